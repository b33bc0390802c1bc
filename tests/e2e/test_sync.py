"""Sync from real Megatron ranks into a real engine, against an engine that loaded the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from megarl.resharding import SyncStats
from megarl.weights.planner import Place
from tests.e2e.syncing import ACTOR, BUCKET_BYTES, Step, plan_of, sync
from tests.pool import RankPool
from tests.rollout.conftest import Answers, ask, start
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import family, qwen2, random_model, save
from tests.rollout.oracles import assert_same

pytestmark = [pytest.mark.e2e, pytest.mark.dist]

ALIGNMENT = 16  # of messages and parameters in a buffer


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the weights get from the actor into an engine.

    Args:
        overrides: of the debug configuration.
        nodes: of the trainers and the engine's ranks.
        transport: between them.
    """

    overrides: tuple[str, ...] = ()
    nodes: tuple[int, ...] = (0, 0, 0, 0, 0)
    transport: str = "auto"

    @property
    def places(self) -> list[Place]:
        return [Place(node=node) for node in self.nodes]

    def shares(self, trainer: int, engine: int) -> bool:
        """Whether some pair of ranks uses shared memory."""
        return self.transport != "gloo" and self.nodes[trainer] == self.nodes[engine]


# The debug run's actor is TP2 x PP2. Five layers are uneven stages wherever there are several.
TP1 = {
    "tp1-pp1-dp4": Way(overrides=(f"{ACTOR}={{tp: 1, pp: 1}}",)),
    "tp2-pp2": Way(transport="shared_memory"),
    "tp4": Way(overrides=(f"{ACTOR}={{tp: 4, pp: 1}}",), transport="gloo"),
    "pp4": Way(overrides=(f"{ACTOR}={{tp: 1, pp: 4}}",), nodes=(0, 0, 1, 1, 1)),
    "tp2-dp2-sp": Way(overrides=(f"{ACTOR}={{tp: 2, pp: 1, sequence_parallel: true}}",), nodes=(0, 0, 1, 1, 1)),
    "pp2-vpp2-dp2": Way(overrides=(f"{ACTOR}={{tp: 1, vpp: 2}}",)),
}
TP2 = {
    "tp2-pp2": Way(nodes=(0,) * 6),
    "pp4": Way(overrides=(f"{ACTOR}={{tp: 1, pp: 4}}",), nodes=(0, 0, 1, 1, 1, 1)),
}
EP2 = Way(
    overrides=(
        f"{ACTOR}={{tp: 2, pp: 1, ep: 2, sequence_parallel: true}}",
        "groups.train.roles.reference.sequence_parallel=true",
    )
)


def five_layers(*, kv_heads: int) -> PreTrainedConfig:
    config = qwen2(kv_heads=kv_heads)
    config.num_hidden_layers = 5
    config.layer_types = ["full_attention"] * 5
    return config


def tied() -> PreTrainedConfig:
    config = five_layers(kv_heads=4)
    config.tie_word_embeddings = True
    return config


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models; syncs alternate between them, so that one that wrote nothing would be seen."""
    root = tmp_path_factory.mktemp("synced")
    return [save(random_model(five_layers(kv_heads=4), seed), root / str(seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path_factory.mktemp("engine"))
    yield process
    process.close()


def fresh(process: EngineProcess, directory: Path) -> Answers:
    """The answers of an engine that loaded the directory itself."""
    start(process, directory, weights="files")
    return ask(process)


def fill(pool: RankPool, process: EngineProcess, way: Way, directory: Path, version: int) -> None:
    """One sync; what it moved is checked.

    Every engine rank received its shard once, in as many messages as planned, and had the memory of two buckets besides
    that of a layer that is larger than one. Trainers wrote to it, and needed no memory of their own, where they could.
    """
    (outcome,) = sync(
        pool, process, way.overrides, directory, Step(version=version), places=way.places, transport=way.transport
    )
    transfers = plan_of(way.overrides, directory, way.places)
    to_write: Counter[tuple[int, int]] = Counter()
    for rank, stats in zip(sorted(transfers.receivers), _stats(outcome.engine), strict=True):
        part = transfers.receivers[rank]
        messages = [message for bucket in part.messages for message in bucket]
        assert (stats.version, stats.nbytes, stats.messages) == (version, part.nbytes, len(messages))
        layers: Counter[str] = Counter()
        for name, info in part.params.items():
            layers[name.rpartition(".")[0]] += info.nbytes
        largest = max(layers.values())
        assert largest > BUCKET_BYTES
        slack = ALIGNMENT * (max(map(len, part.messages)) + max(len(bucket.params) for bucket in part.buckets))
        assert stats.peak_staging_bytes <= 2 * (BUCKET_BYTES + slack) + largest
        for message in messages:
            if way.shares(message.sender, rank):
                to_write[message.sender, rank] += message.nbytes
    written = {(t, e): nbytes for t, counted in enumerate(outcome.written) for e, nbytes in counted.items()}
    assert written == to_write
    for rank, stats in enumerate(_stats(outcome.trainers)):
        part = transfers.senders.get(rank)
        messages = part.messages if part else ()
        assert stats.nbytes == sum(message.nbytes for message in messages)
        staged = any(not way.shares(rank, message.receiver) for message in messages)
        assert 0 <= stats.peak_staging_bytes <= staged * 2 * (BUCKET_BYTES + ALIGNMENT * len(messages))


def _stats(told: Sequence[SyncStats | str | None] | str) -> list[SyncStats]:
    """What the ranks counted; none of them has failed."""
    assert not isinstance(told, str), told
    assert all(isinstance(stats, SyncStats) for stats in told), told
    return [stats for stats in told if isinstance(stats, SyncStats)]


def test_every_layout_fills_an_engine_bit_for_bit(
    pool: RankPool, process: EngineProcess, directories: list[Path]
) -> None:
    answers = [fresh(process, directory) for directory in directories]
    start(process, directories[0])
    for version, way in enumerate(TP1.values()):
        which = version % 2
        fill(pool, process, way, directories[which], version)
        assert_same(ask(process), answers[which])


def test_every_rank_of_an_engine_gets_its_shard(pool: RankPool, process: EngineProcess, tmp_path: Path) -> None:
    """Ranks of the engine, and of a TP2 actor, share the only KV head."""
    directory = save(random_model(five_layers(kv_heads=1), 3), tmp_path / "model")
    expected = fresh(process, directory)
    start(process, directory, tp=2)
    for version, way in enumerate(TP2.values()):
        fill(pool, process, way, directory, version)
        assert_same(ask(process), expected, atol=1e-5)  # the sums of a split matrix are rounded elsewhere


@pytest.mark.parametrize(
    ("config", "way"),
    [(tied(), Way()), (family("qwen3_moe"), EP2)],
    ids=["two stages hold a tied embedding", "replicas share the experts"],
)
def test_tensors_that_ranks_share_arrive(
    pool: RankPool, process: EngineProcess, tmp_path: Path, config: PreTrainedConfig, way: Way
) -> None:
    directory = save(random_model(config, 3), tmp_path / "model")
    expected = fresh(process, directory)
    start(process, directory)
    fill(pool, process, way, directory, 0)
    assert_same(ask(process), expected)
