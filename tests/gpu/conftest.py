"""Ranks on GPUs for the same jobs as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.pool import RankPool


def has_transformer_engine() -> bool:
    """Returns whether this machine's GPU can have Transformer Engine's layers."""
    installed = find_spec("transformer_engine") is not None and torch.cuda.is_available()
    return installed and torch.cuda.get_device_capability() >= (9, 0)  # of its packed attention


@pytest.fixture(scope="session")
def cuda() -> str:
    """The device; skips where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return "cuda"


@pytest.fixture(scope="session")
def gpu(cuda: str) -> Iterator[RankPool]:
    """One warm rank process on the first GPU, in a world of NCCL."""
    ranks = RankPool(1, device=cuda)
    yield ranks
    ranks.close()


def need(gpus: int) -> None:
    """Skips a test where there are fewer."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, and torch sees {torch.cuda.device_count()}")


@pytest.fixture(scope="session")
def two_gpus(cuda: str) -> Iterator[RankPool]:
    """Two warm rank processes, on a GPU each."""
    need(2)
    ranks = RankPool(2, device=cuda, gpus=2)
    yield ranks
    ranks.close()
