"""Engines that compute in float8: a sync quantizes each layer again, as loading the files does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megarl.types import Layout
from tests.rollout.conftest import ask, sequences, start
from tests.rollout.engine_process import EngineProcess, RemoteError
from tests.rollout.models import family, random_model, save
from tests.rollout.oracles import assert_same, hf_raw_logprobs
from tests.rollout.syncing import Trainer, sync

pytestmark = [pytest.mark.e2e]

FLOAT8 = {"quantization": "fp8_per_channel"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A GPT-2: its layers have biases, which stay as they are."""
    root = tmp_path_factory.mktemp("float8")
    return [save(random_model(family("gpt2", dtype="bfloat16"), seed), root / str(seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Hosts engines of two ranks."""
    process = EngineProcess(tmp_path_factory.mktemp("pair"))
    yield process
    process.close()


def test_a_synced_engine_equals_one_that_quantized_the_files(process: EngineProcess, directories: list[Path]) -> None:
    start(process, directories[0], weights="files", **FLOAT8)
    expected = ask(process)
    sync(process, directories[1], 1, Layout(tp=2, pp=2))
    moved = process.call("logprobs", sequences()).values
    exact = hf_raw_logprobs(directories[1], sequences()).values
    assert 1e-4 < np.abs(moved - exact).mean() < 0.1, "float8 is near the weights that were sent, and rounds"
    sync(process, directories[0], 2, Layout(tp=2, pp=2))
    assert_same(ask(process), expected)


@pytest.mark.matrix
def test_an_aborted_sync_does_not_deadlock_ranks_that_exchange_scales(
    pair: EngineProcess, directories: list[Path]
) -> None:
    """One rank's bucket is corrupt while the other loads its own, which takes both ranks."""
    start(pair, directories[0], tp=2, weights="files", **FLOAT8)
    expected = ask(pair)
    for bucket in (0, 3):
        Trainer(pair, directories[1]).fail_to_sync(1, corrupt=(1, bucket), reason=f"for bucket {bucket} is corrupt")
        with pytest.raises(RemoteError, match="RuntimeError: engine 3 has the weights of two versions"):
            ask(pair)
    sync(pair, directories[1], 2)
    sync(pair, directories[0], 3)
    assert_same(ask(pair), expected)
