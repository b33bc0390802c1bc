"""What trainers on CUDA set before it starts: the allocator's segments, and one queue under tensor parallelism."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megarl.config import load
from megarl.megatron import worker
from megarl.megatron.worker import MegatronWorker

SEGMENTS, ONE_QUEUE = "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS"


class StoppedError(Exception):
    """Ends a start where CUDA would be used for the first time."""


@pytest.mark.parametrize(
    ("device", "tp", "user", "segments", "queues"),
    [
        ("cuda", 1, {}, [SEGMENTS], None),
        ("cuda", 2, {}, [SEGMENTS], "1"),
        ("cuda", 2, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native", ONE_QUEUE: "8"}, [], "8"),
        ("cuda", 1, {"PYTORCH_ALLOC_CONF": ""}, [], None),
        ("cpu", 2, {}, [], None),
    ],
)
def test_trainers_set_options_of_cuda_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    tp: int,
    user: dict[str, str],
    segments: list[str],
    queues: str | None,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", ONE_QUEUE):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    found: list[tuple[str | None, bool]] = []

    def start_platform(kind: str, *, fused: bool) -> None:
        assert kind == device
        found.append((os.environ.get(ONE_QUEUE), fused))
        raise StoppedError

    monkeypatch.setattr(worker, "start_platform", start_platform)
    roles = [f"groups.train.roles.{role}.tp={tp}" for role in ("actor", "reference")]
    config = load("configs/debug/grpo.yaml", [f"cluster.device={device}", "groups.train.devices=0-1", *roles])
    with pytest.raises(StoppedError):
        MegatronWorker(config, "train", 0).start("tcp://127.0.0.1:1")
    assert given == segments
    assert found == [(queues, device == "cuda")]


_ROPE = """
import torch
from torch import compile

compiled = []
torch.compile = lambda function: compiled.append(function.__name__) or (lambda x, *_, **__: 2 * x)
from megarl.megatron.platform import start_platform

start_platform("cpu", fused={fused})
torch.compile = compile
from megatron.core.models.common.embeddings import rope_utils

x = torch.ones(3, 1, 4)
angles = torch.zeros(3, 1, 1, 4)
options = dict(rotary_interleaved=False, multi_latent_attention=False, mscale=1.0)
turned = rope_utils._apply_rotary_pos_emb_thd(x, None, angles, cp_group=None, **options)
print(compiled, turned.unique().tolist())
"""


@pytest.mark.process
def test_rope_is_compiled_where_kernels_are_fused() -> None:
    for fused, expected in ((True, "['_apply_rotary_pos_emb_bshd'] [2.0]"), (False, "[] [1.0]")):
        command = [sys.executable, "-c", _ROPE.format(fused=fused)]
        done = subprocess.run(command, check=False, timeout=240, capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == (expected, "")


def test_torch_knows_the_setting() -> None:
    torch._C._accelerator_setAllocatorSettings(SEGMENTS)
    try:
        assert torch._C._accelerator_getAllocatorSettings() == SEGMENTS
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
