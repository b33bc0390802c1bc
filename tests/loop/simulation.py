"""A run in simulated time: real buffer, sampler and dispatch of the work, with engines and a trainer that take random
times."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megarl.algos.curriculum import pools
from megarl.cluster.ray_worker import ChunkRefs
from megarl.data.prompt_curriculum import Curriculum
from megarl.data.prompts import sample_requests
from megarl.data.stream import stable_hash
from megarl.groups.resharder import Resharder
from megarl.groups.rollouts import Rollouts
from megarl.loop.forward_passes import ForwardPasses
from megarl.loop.rollout_buffer import RolloutBuffer
from megarl.loop.rollout_trainer import RolloutTrainer
from megarl.loop.sampler import RolloutParts, Sampled, Sampler
from megarl.loop.scoring import ScoredSamples, ScoresByReward, scores_by_prompt
from megarl.megatron.worker_requests import ForwardRequest
from megarl.run.results import EvaluationResult
from megarl.types import Layout, Prompt, Ragged, SampleInfo, Schedule
from tests.loop.simulated_conversations import Conversations
from tests.loop.simulated_engines import Engines
from tests.loop.simulated_sync import resharder
from tests.loop.simulated_time import SimulatedMonitor, SimulatedTime

SEED, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, CHUNKS = 5, 3, 2, 4
PROMPTS = [Prompt(prompt_id=f"p{index}", token_ids=(index, 7)) for index in range(11)]


class Scorer:
    """Scores a sample by its tokens, and by all samples of the call as a model does by their packing, after a time."""

    model = None

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    async def score(self, rollouts: Rollouts, prompts: Mapping[str, Prompt], functions: object) -> ScoredSamples:
        assert {sample.prompt_id for sample in rollouts.samples} <= set(prompts)
        await asyncio.sleep(self._chance.choice([1, 10]) * self._chance.random())
        scores = [
            float(sum(rollouts.chunks[sample.chunk].response_ids[sample.row].tolist()) % 3)
            for sample in rollouts.samples
        ]
        packing = stable_hash(*sorted(sample.sample_id for sample in rollouts.samples)) % 1009
        packed = np.full(len(scores), packing, np.float32)
        return ScoredSamples(samples=rollouts.samples, scores={"rule": np.float32(scores), "packed": packed})


def differ(sources: ScoresByReward, samples: Sequence[SampleInfo]) -> Any:
    """Keeps prompts whose samples do not all score the same."""
    of_prompt = scores_by_prompt(samples, sources["rule"])
    return np.array([len(set(of_prompt[sample.prompt_id])) > 1 for sample in samples]), sources["rule"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    mode: str = "exact"
    staleness: int
    engines: int = 2
    steps: int = 6
    filtered: bool = False
    losses: int = 0
    evaluates: bool = False
    blocking: bool = True
    start_s: float = 3.0
    rolling: bool = False
    shared: bool = False
    greedy: bool = False
    parts: int = 1
    conversations: bool = False
    curriculum: bool = False


class Devices:
    """The colocation of a run; the trainers work and the engines generate only where they have the devices."""

    def __init__(self, engines: Engines, resharder: Resharder, *, shared: bool) -> None:
        self._engines, self._resharder, self.shared, self.training = engines, resharder, shared, True

    async def to_training(self) -> None:
        assert not self.shared or not self._engines.running
        self.training = True

    async def to_rollout(self) -> None:
        self.training = False

    async def sync(self, version: int) -> None:
        assert self.training or not self.shared, "the engines have the devices already"
        await self._resharder.sync(version)
        self.training = False


class Role:
    """Answers immediately: a token's number depends on the weights' version and on the packing of its sample.

    Args:
        generating: whether engines have responses in progress.
    """

    def __init__(self, name: str, generating: Callable[[], bool]) -> None:
        self.name, self.group, self.layout = name, name, Layout(dp=2)
        self._generating, self.version = generating, 0
        self.begun: list[bool] = []
        """Of each call, whether engines had responses in progress."""

    def dispatch_by_chunk(self, method: object, request: ForwardRequest[Schedule]) -> Any:
        self.begun.append(self._generating())
        columns: dict[int, Ragged] = {}
        for rank in request.schedule.ranks:
            seeds: dict[tuple[int, int], int] = {}
            for pack in rank.packs:
                seed = stable_hash(self.name, self.version, hash(pack))
                seeds.update({(row.chunk, row.row): seed for row in pack})
            for index in rank.chunks:
                chunk = request.chunks[index]
                rows = range(len(chunk.response_ids))
                assert all((index, row) in seeds for row in rows), "a chunk is not whole"
                filled = zip(rows, chunk.response_ids, strict=True)
                values = [[seeds[index, row] % 1009] * len(ids) for row, ids in filled]
                columns[index] = Ragged.from_rows(values, np.float32)
        refs: Any = columns
        return SimpleNamespace(chunks=ChunkRefs(refs))


class Simulation:
    """A run whose times come from `chance`."""

    def __init__(self, setup: Setup, chance: random.Random) -> None:
        self.setup, self.chance, self.clock = setup, chance, SimulatedTime()
        self.monitor = SimulatedMonitor(self.clock)
        self.engines = Engines(
            self.monitor, chance, engines=setup.engines, mode=setup.mode, losses=setup.losses, start_s=setup.start_s
        )
        config: Any = SimpleNamespace(
            steps=setup.steps,
            run=SimpleNamespace(seed=SEED),
            recorded_kept_max=None,
            reward=SimpleNamespace(functions=()),
            data=SimpleNamespace(prompts_per_step=PROMPTS_PER_STEP, samples_per_prompt=SAMPLES_PER_PROMPT),
            rollout=SimpleNamespace(
                max_staleness=setup.staleness,
                mode=setup.mode,
                engines=setup.engines,
                rolling_update=setup.rolling,
                inference_parts=setup.parts,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                min_p=0.0,
                min_new_tokens=0,
            ),
            algo=SimpleNamespace(
                filter=setup.filtered or None,
                kl=SimpleNamespace(reference_sync=None),
                has_logprob_pass=True,
            ),
            role=lambda name: SimpleNamespace(tokens_per_micro_batch=20),
        )
        self.generator = Conversations(self.monitor, chance, self.engines) if setup.conversations else self.engines
        names = ("actor", "critic", "reference")
        self.roles = {name: Role(name, lambda: bool(self.engines.running)) for name in names}
        roles: Any = self.roles
        self.passes = ForwardPasses(config, config.algo, roles)
        moves = resharder(self.monitor, chance, self.engines, config.rollout)
        self.devices: Any = Devices(self.engines, moves, shared=setup.shared)
        scorer: Any = Scorer(chance)
        begin = None if setup.filtered else self.passes.begin
        curriculum = Curriculum(
            [prompt.prompt_id for prompt in PROMPTS],
            partial(pools, hard_share=0.4, half_life=4.0),
            name="pools",
            seed=SEED,
            staleness=setup.staleness,
            score_range=(0.0, 2.0),
        )
        sampler = Sampler(
            config,
            PROMPTS,
            RolloutParts(engines=self.engines, generator=self.generator, scorer=scorer, colocation=self.devices),
            CHUNKS,
            keep=differ if setup.filtered else None,
            max_rounds=3,
            greedy=setup.greedy,
            begin_forwards=begin,
            curriculum=curriculum if setup.curriculum else None,
        )
        self.buffer = RolloutBuffer(config, sampler, self.engines, self.devices)
        self.trained: dict[int, Sampled] = {}
        self.synced: list[int] = []
        self.evaluated: list[tuple[int, EvaluationResult]] = []
        """Results of evaluations during the training, and the step after which they came."""
        self.columns: dict[int, Mapping[str, Sequence[Sequence[float]]]] = {}
        """Of each step and pass, the values of each sample."""

    def load(self, state: Mapping[str, Any], directory: Path) -> None:
        async def load() -> None:
            self.buffer.load(state, directory)

        self.monitor.drive(load())

    def begin(self, step: int = 0) -> None:
        self.monitor.drive(self._begin(step))

    def train(self, after: int = 0, last: int | None = None) -> Simulation:
        """Begins after a step, and takes the steps up to the last one, or all of them."""
        self.begin(after)
        for step in range(after + 1, (last or self.setup.steps) + 1):
            self.step(step)
        return self

    async def _begin(self, step: int) -> None:
        self.roles["actor"].version = self.roles["critic"].version = step
        await self.devices.sync(step)
        self.buffer.begin(step)

    def step(self, step: int) -> None:
        """Trains on a step, and moves the weights where they are due."""
        self.monitor.drive(self._step(step))

    async def _step(self, step: int) -> None:
        self.trained[step] = sampled = await self.buffer.take(step)
        forwards = self.passes.complete(sampled.rollouts, sampled.forwards)
        columns = {name: ChunkRefs[Ragged].of(part.chunks for part in parts) for name, parts in forwards.items()}
        self.columns[step] = {
            name: [column[sample.chunk][sample.row].tolist() for sample in sampled.rollouts.samples]
            for name, column in columns.items()
        }
        scored = await sampled.scoring
        scores = scores_by_prompt(sampled.rollouts.samples, scored.scores["rule"])
        self.buffer.note(step, scores if sampled.scores is None else sampled.scores)
        if sampled.greedy is not None:
            await sampled.greedy
        self.roles["actor"].version = self.roles["critic"].version = step
        assert self.devices.training or not self.setup.shared
        await asyncio.sleep(self.chance.choice([0.1, 3.0]) * self.chance.random())
        if step < self.setup.steps and self.buffer.skips_sync(step):
            return
        await self.buffer.prepare_sync()
        await self.devices.sync(step)
        self.buffer.synced(step)
        self.synced.append(step)
        if self.setup.evaluates:
            await self._evaluate(step)

    async def _evaluate(self, step: int) -> None:
        """Evaluates the newest weights, between two steps or during the next ones."""

        async def measure() -> EvaluationResult:
            requests = sample_requests(PROMPTS, 1, seed=SEED, step=0)
            rollouts = await self.generator.generate(requests, CHUNKS).result()
            assert len(rollouts.samples) == len(PROMPTS)
            places = [(rollouts.chunks[sample.chunk], sample.row) for sample in rollouts.samples]
            found = {span.version for chunk, row in places for span in chunk.versions[row]}
            return EvaluationResult(step=step, metrics={"oldest": min(found), "newest": max(found)}, samples=[])

        if self.setup.blocking:
            result = await self.engines.require(measure())
            assert result.metrics == {"oldest": step, "newest": step}
            return
        trainer: Any = SimpleNamespace(_buffer=self.buffer)
        self.buffer.run_beside(RolloutTrainer._noting_versions(trainer, measure()))
        results = await self.buffer.take_results(wait=step == self.setup.steps)
        self.evaluated += [(step, result) for result in results]


def run(setup: Setup, seed: int) -> Simulation:
    return Simulation(setup, random.Random(seed)).train()


def saved(setup: Setup, seed: int, step: int, directory: Path) -> tuple[Simulation, dict[str, Any]]:
    """A run up to a step, and the state that it saves some time later."""
    simulation = Simulation(setup, random.Random(seed)).train(last=step)
    simulation.monitor.work(simulation.chance.random())
    return simulation, simulation.buffer.state(directory)


def resumed(setup: Setup, seed: int, step: int, state: Mapping[str, Any], directory: Path) -> Simulation:
    """A run from the state after a step to its end."""
    simulation = Simulation(setup, random.Random(seed))
    simulation.load(state, directory)
    return simulation.train(after=step)


def trained(*simulations: Simulation) -> list[list[tuple[str, list[int], list[int]]]]:
    """The content of all steps."""
    return [content(each.trained[step]) for each in simulations for step in sorted(each.trained)]


def assert_trained_once(*simulations: Simulation) -> None:
    """Every sample of a run is trained on, once."""
    ids = [sample_id for samples in trained(*simulations) for sample_id, _, _ in samples]
    assert len(ids) == len(set(ids)) == simulations[-1].setup.steps * PROMPTS_PER_STEP * SAMPLES_PER_PROMPT


def oldest(simulation: Simulation) -> int:
    """How many versions older than the actor a token is at most when it is trained on."""
    return max(max(ages(step, sampled)) for step, sampled in simulation.trained.items())


def ages(step: int, sampled: Sampled) -> list[int]:
    """How many versions older than the actor each token is when it is trained on."""
    return [step - 1 - version for _, _, versions in content(sampled) for version in versions]


def content(sampled: Sampled) -> list[tuple[str, list[int], list[int]]]:
    """The id, tokens and versions of every sample; given tokens as negative numbers."""
    found: list[tuple[str, list[int], list[int]]] = []
    for sample in sampled.rollouts.samples:
        chunk = sampled.rollouts.chunks[sample.chunk]
        versions = [span.version for span in chunk.versions[sample.row] for _ in range(span.start, span.stop)]
        ids = chunk.response_ids[sample.row]
        mask = np.ones(len(ids), np.bool_) if chunk.loss_mask is None else chunk.loss_mask[sample.row]
        assert (sample.response_tokens, sample.given_tokens) == (mask.sum(), (~mask).sum())
        found.append((sample.sample_id, np.where(mask, ids, -ids).tolist(), versions))
    return found
