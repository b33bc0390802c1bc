"""vLLM's sleep frees GPU memory, and a sync of the same weights restores the answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.rollout import in_process
from tests.rollout.conftest import Answers, ask, start
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import qwen2, random_model, save
from tests.rollout.syncing import Trainer

pytestmark = pytest.mark.gpu

CACHE_MIB = 1024


def wake(process: EngineProcess, trainer: Trainer) -> Answers:
    """Wakes and syncs in the order of an iteration; returns the engine's answers."""
    process.call("wake_weights")
    trainer.sync(1)
    process.call("wake_cache")
    return ask(process)


def test_sleep_frees_memory_and_a_sync_restores_the_answers(cuda: str, tmp_path: Path) -> None:
    directory = save(random_model(qwen2(), 1), tmp_path / "model")
    process = EngineProcess(tmp_path)
    start(process, directory, device=cuda, sleep=True, kv_cache_mib=CACHE_MIB)
    trainer = Trainer(process, directory, device=cuda)
    before = wake(process, trainer)
    awake = process.apply(in_process.free_bytes)
    process.call("sleep")
    freed = process.apply(in_process.free_bytes) - awake
    after = wake(process, trainer)
    process.close()
    assert freed > 0.9 * CACHE_MIB * 2**20
    for name in ("response_ids", "rollout_logprobs"):
        np.testing.assert_array_equal(getattr(after.chunk, name).values, getattr(before.chunk, name).values, name)
