"""A real engine that sleeps: it answers only while awake, with the weights of the last sync."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.rollout import in_process
from tests.rollout.conftest import Answers, ask, start
from tests.rollout.engine_process import EngineProcess, RemoteError
from tests.rollout.oracles import assert_same
from tests.rollout.syncing import Trainer

pytestmark = [pytest.mark.e2e]


def test_it_answers_with_synced_weights_after_waking(
    process: EngineProcess, models: Mapping[str, Path], fresh: Mapping[str, Answers]
) -> None:
    start(process, models["qwen2"], sleep=True)
    with pytest.raises(RemoteError, match="engine 3 cannot answer while it is asleep"):
        ask(process)
    for version, name in ((4, "qwen2"), (5, "qwen2_later"), (5, "qwen2_later")):
        trainer = Trainer(process, models[name])
        process.call("wake_weights")
        with pytest.raises(RemoteError, match=r"RuntimeError: engine 3 .* weights"):
            process.call("wake_cache")
        trainer.sync(version)
        process.call("wake_cache")
        assert_same(ask(process), fresh[name])
        assert process.apply(in_process.recv_buffer_bytes) > 0, "syncs would touch every page anew"
        process.call("sleep")
        assert process.apply(in_process.recv_buffer_bytes) == 0


def test_weights_from_files_are_restored_after_sleep(
    process: EngineProcess, models: Mapping[str, Path], fresh: Mapping[str, Answers]
) -> None:
    start(process, models["qwen2"], weights="files", sleep=True)
    for _ in range(2):
        process.call("wake_weights")
        process.call("wake_cache")
        assert_same(ask(process), fresh["qwen2"])
        process.call("sleep")
