"""What an engine's process takes in a sync and when it generates, and what the sender takes, against the plan."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from megarl.cluster.process_usage import take_peak_memory
from megarl.models import model_spec
from megarl.preflight.memory_plan import DevicePlan
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.engine_memory import EngineRankMemory
from megarl.rollout.engine_options import EngineOptions
from megarl.types import Prompt, SampleRequest
from megarl.weights.hf_files import read_config
from tests.megatron.memory import assert_planned, present, return_freed_memory
from tests.megatron.test_memory_plan import SIZES
from tests.rollout import in_process
from tests.rollout.conftest import requests, rollout_config, start
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import random_model, save
from tests.rollout.syncing import Trainer

BUCKET_BYTES = 16 << 20
CONFIG = {**SIZES, "num_hidden_layers": 4, "vocab_size": 24000}
"""In a batch, activations and logits take about the same."""
BATCHES = {"activations": (8, 512), "logits": (256, 2)}
"""Prompts and their tokens."""


def _closed(engine: RolloutEngine) -> int:
    """Closes the engine; bytes that its process still has."""
    engine.close()
    gc.collect()
    return_freed_memory()
    return present()


def _peak(_engine: RolloutEngine) -> int:
    return take_peak_memory()


def _restore(_engine: RolloutEngine) -> None:
    return_freed_memory(at_once=False)


def _requests(count: int, length: int) -> list[SampleRequest]:
    ids = torch.randint(2, CONFIG["vocab_size"], (count, length)).tolist()
    return [
        SampleRequest(sample_id=f"{i}", prompt=Prompt(prompt_id=f"{i}", token_ids=tuple(row)), seed=i, max_new_tokens=2)
        for i, row in enumerate(ids)
    ]


@pytest.mark.e2e
@pytest.mark.matrix
def test_process_memory_is_as_planned(
    process: EngineProcess, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond what the process has after an engine that has generated, as vLLM imports much at its first step.

    In float32, which oneDNN packs on every x86 processor; 16 bits need AVX-512 for that.
    """
    monkeypatch.setattr("tests.rollout.syncing.BUCKET_BYTES", BUCKET_BYTES)
    model = random_model(Qwen2Config(**CONFIG, bos_token_id=0, eos_token_id=1, dtype="float32"), 1)
    directory = save(model, tmp_path)
    config = rollout_config(kv_cache_mib=64).model_copy(update={"max_model_len": 520})
    engine = EngineRankMemory.of(model_spec(read_config(directory)), config, "cpu", int)
    plan = DevicePlan(device=0, kind="cpu", engine=engine, bucket=BUCKET_BYTES)
    planned = {phase.phase: phase.peak - phase.process for phase in plan.phases()}

    start(process, models["qwen2"], weights="files")
    process.apply(in_process.generate, requests(1), [1])
    before = process.apply(_closed)
    options = EngineOptions(vocab_size=CONFIG["vocab_size"], device="cpu")
    process.start(model_dir=directory, rollout=config, options=options, engine_id=0)
    trainer = Trainer(process, directory)
    process.apply(_peak)
    sent = present()
    take_peak_memory()
    trainer.sync(1)
    found = {"sender": take_peak_memory() - sent, "sync": process.apply(_peak) - before}
    for name, (count, length) in BATCHES.items():
        process.apply(in_process.generate, _requests(count, length), [count], count)
        found[name] = process.apply(_peak) - before
    process.apply(_restore)
    generate = dict.fromkeys(BATCHES, planned["generate"])
    assert_planned(found, {"sender": 2 * BUCKET_BYTES, "sync": planned["sync"], **generate})
