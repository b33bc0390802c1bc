"""Weights from real Megatron ranks into a real engine, shard to shard, against an engine that loaded the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megarl.config import RunConfig, load
from megarl.resharding import Place, SyncSpec, SyncStats, serve_store
from megarl.types import Layout
from megarl.weights.files import read_config
from megarl.weights.planner import Holder, plan
from megarl.weights.plans import TransferPlan
from megarl.weights.specs import model_spec
from tests.pool import RankPool, free_port
from tests.rollout.conftest import Answers, ask, start
from tests.rollout.engine_process import EngineProcess, RemoteError
from tests.rollout.models import llama, qwen2, random_model, save
from tests.rollout.oracles import assert_same

pytestmark = [pytest.mark.e2e, pytest.mark.dist]

BUCKET_BYTES = 1 << 16
ACTOR = "groups.train.roles.actor"
LAYOUTS = {
    "tp1-pp1-dp4": [f"{ACTOR}={{tp: 1, pp: 1}}"],
    "tp2-pp2": [],
    "tp4": [f"{ACTOR}={{tp: 4, pp: 1}}"],
    "pp4": [f"{ACTOR}={{tp: 1, pp: 4}}"],
    "tp2-dp2-sp": [f"{ACTOR}={{tp: 2, pp: 1, sequence_parallel: true}}"],
    "pp2-vpp2-dp2": [f"{ACTOR}={{tp: 1, vpp: 2}}"],
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models; syncs alternate between them, so that one that wrote nothing would be seen."""
    root = tmp_path_factory.mktemp("synced")
    return [save(random_model(qwen2(kv_heads=4), seed), root / str(seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def fresh(
    directories: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineProcess, list[Answers]]]:
    """What engines answer that loaded the directories, and a process for another engine."""
    process = EngineProcess(tmp_path_factory.mktemp("engine"))
    answers = []
    for directory in directories:
        start(process, directory, weights="files")
        answers.append(ask(process))
    yield process, answers
    process.close()


def _send(rank: int, overrides: list[str], port: int, directory: Path, spec: SyncSpec, version: int) -> Any:
    """A Megatron rank that loads a model and takes part in one sync."""
    from megarl.megatron.worker import MegatronWorker

    worker = MegatronWorker(load("configs/debug/ppo.yaml", overrides), "train", rank)
    worker.start(f"tcp://127.0.0.1:{port}")
    worker.load(str(directory))
    worker.connect(spec.only([rank]), rank)
    stats = worker.send_weights(version)
    written = dict(worker._connection.put)
    worker.close()
    return stats, written


def _plan(config: RunConfig, directory: Path, tp: int) -> TransferPlan:
    spec = model_spec(read_config(directory))
    layout: Layout = config.layout("actor")
    trainers = [Holder(rank=r, map=spec.megatron_map(layout, r)) for r in range(layout.world_size)]
    engines = [Holder(rank=layout.world_size + r, map=spec.vllm_map(tp, r)) for r in range(tp)]
    return plan(trainers, engines, BUCKET_BYTES)


def _sync(
    pool: RankPool, process: EngineProcess, overrides: list[str], directory: Path, tp: int, version: int
) -> tuple[TransferPlan, list[Any], list[SyncStats]]:
    transfers = _plan(load("configs/debug/ppo.yaml", overrides), directory, tp)
    store = serve_store()
    spec = SyncSpec.of(
        transfers, name="test", host="localhost", port=store.port, places=[Place()] * (4 + tp), timeout_s=100
    )
    with ThreadPoolExecutor(1) as executor:
        sending = executor.submit(
            pool.run, _send, overrides, free_port(), directory, spec, version, world_size=4, connected=False
        )
        try:
            process.call("connect", spec.only(range(4, 4 + tp)), range(4, 4 + tp))
            received = process.call("receive_weights", version)
        except RemoteError:
            sending.result()  # where a trainer's rank failed, that is the reason
            raise
        return transfers, sending.result(), received


def _check_bytes(transfers: TransferPlan, sent: list[Any], received: list[SyncStats]) -> None:
    """Every engine rank received its shard once, in as many messages as planned, and has the memory of two buckets.

    Some parameters are larger than a bucket. The trainers need no memory: they write to the engines'.
    """
    for rank, stats in enumerate(received, start=4):
        part = transfers.receivers[rank]
        messages = [message for bucket in part.messages for message in bucket]
        assert stats.nbytes == part.nbytes
        assert stats.messages == len(messages)
        assert max(info.nbytes for info in part.params.values()) > BUCKET_BYTES
        assert stats.peak_staging_bytes <= 2 * BUCKET_BYTES
    for rank, (stats, written) in enumerate(sent):
        part = transfers.senders.get(rank)
        messages = part.messages if part else ()
        assert stats.nbytes == sum(message.nbytes for message in messages) == sum(written.values())
        assert stats.peak_staging_bytes == 0
    written = sum((Counter(counted) for _, counted in sent), Counter())
    assert written == {rank: part.nbytes for rank, part in transfers.receivers.items()}


def test_every_layout_fills_an_engine_bit_for_bit(
    pool: RankPool, fresh: tuple[EngineProcess, list[Answers]], directories: list[Path]
) -> None:
    process, answers = fresh
    start(process, directories[0])
    for version, (name, overrides) in enumerate(LAYOUTS.items()):
        which = version % 2
        moved = _sync(pool, process, overrides, directories[which], 1, version)
        _check_bytes(*moved)
        assert_same(ask(process), answers[which], atol=0.0)
        assert moved[2][0].version == version, name


@pytest.mark.parametrize("layout", ["tp2-pp2", "pp4"])
def test_every_rank_of_an_engine_gets_its_shard(
    pool: RankPool, fresh: tuple[EngineProcess, list[Answers]], directories: list[Path], layout: str
) -> None:
    process, answers = fresh
    start(process, directories[0], tp=2)
    for version, which in ((1, 0), (2, 1)):
        _check_bytes(*_sync(pool, process, LAYOUTS[layout], directories[which], 2, version))
        assert_same(ask(process), answers[which], atol=1e-5)  # the sums of a split matrix are rounded elsewhere


@pytest.mark.parametrize("model", ["tied qwen2", "llama"])
def test_tied_embeddings_arrive(
    pool: RankPool, fresh: tuple[EngineProcess, list[Answers]], tmp_path: Path, model: str
) -> None:
    """Two stages hold the one tensor; the engine needs it twice, packed in one place."""
    process, _ = fresh
    config = llama()
    if model == "tied qwen2":
        config = qwen2(kv_heads=4)
        config.tie_word_embeddings = True
    directory = save(random_model(config, 3), tmp_path / "model")
    start(process, directory, weights="files")
    expected = ask(process)
    start(process, directory)
    _check_bytes(*_sync(pool, process, LAYOUTS["tp2-pp2"], directory, 1, 0))
    assert_same(ask(process), expected, atol=0.0)
