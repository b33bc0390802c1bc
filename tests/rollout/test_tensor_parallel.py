"""Engines of two ranks, each a worker process with its own shard; an engine leaves nothing behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from megarl.stacks import take_stacks
from tests.leftovers import comes_true
from tests.rollout import in_process
from tests.rollout.conftest import Answers, requests, start
from tests.rollout.engine_process import EngineProcess
from tests.rollout.oracles import assert_same, version_logprobs
from tests.rollout.syncing import check_sleep, sync

pytestmark = [pytest.mark.e2e]


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A directory whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def pair(temporary: Path, logs: Path) -> Iterator[EngineProcess]:
    """Hosts engines of two ranks, which print into a log."""
    process = EngineProcess(temporary)
    process.apply(in_process.print_errors_to, logs / "engine.log")
    yield process
    process.close()


# One engine's answers come from one rank: the sums of a split matrix are rounded elsewhere.
def test_synced_ranks_equal_an_engine_that_loaded_the_files(
    pair: EngineProcess, models: Mapping[str, Path], fresh: Mapping[str, Answers]
) -> None:
    """Also after a sleep. Each has a KV head of its own; tests/e2e/test_sync.py has ranks that share one."""
    assert_same(check_sleep(pair, models["llama"], tp=2), fresh["llama"], atol=1e-5)


def test_each_rank_answers_with_its_stacks(pair: EngineProcess, logs: Path) -> None:
    found = take_stacks(logs)
    assert [each.name for each in found] == ["engine-rank-0", "engine-rank-1"]
    assert all("/vllm/" in each.text for each in found), found


@pytest.mark.matrix
def test_ranks_receive_weights_between_two_steps(pair: EngineProcess, models: Mapping[str, Path]) -> None:
    start(pair, models["qwen2"], tp=2, weights="files", mode="inflight")
    pair.apply(in_process.begin, requests())
    pair.apply(in_process.take_steps, 5)
    sync(pair, models["qwen2_later"], 1)
    chunks = pair.apply(in_process.end)
    dirs = [models["qwen2"], models["qwen2_later"]]
    assert any(len(chunk.versions[0]) == 2 for chunk in chunks)
    for chunk, expected in zip(chunks, version_logprobs(dirs, requests(), chunks, keep=False), strict=True):
        np.testing.assert_allclose(chunk.rollout_logprobs[0], expected, rtol=0, atol=1e-4)
        assert [span.start for span in chunk.versions[0]] == [0, 5][: len(chunk.versions[0])]


def test_close_leaves_no_processes_or_shared_memory(pair: EngineProcess, temporary: Path) -> None:
    workers, shared = pair.apply(in_process.processes_and_shared_memory)
    assert len(workers) == 2
    assert shared
    assert not any("cpushm" in path for path in shared), "a rank that is killed would leave it"
    assert list(temporary.iterdir())
    pair.call("close")
    assert comes_true(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))
    assert [path for path in shared if os.path.exists(path)] == []
    assert list(temporary.iterdir()) == []
