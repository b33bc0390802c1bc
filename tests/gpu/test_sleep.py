"""vLLM's sleep frees GPU memory, and a sync of the same weights restores the answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.conftest import need
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import qwen2, random_model, save
from tests.rollout.syncing import check_sleep

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tp", [1, 2])
def test_sleep_frees_memory_and_a_sync_restores_the_answers(cuda: str, tmp_path: Path, tp: int) -> None:
    need(tp)
    directory = save(random_model(qwen2(), 1), tmp_path / "model")
    process = EngineProcess(tmp_path)
    check_sleep(process, directory, tp=tp, device=cuda)
    process.close()
