"""A run in simulated time: real buffer, sampler and dispatch of the work, with engines and a trainer that take random
times."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from megarl.cluster.calls import ChunkCall, Routine
from megarl.cluster.engines import RolloutGroup, Rollouts
from megarl.cluster.ray_worker import ChunkRefs
from megarl.data.stream import stable_hash
from megarl.loop.forward_passes import ForwardPasses
from megarl.loop.rollout_buffer import RolloutBuffer
from megarl.loop.sampler import DynamicSampling, Sampled, Sampler
from megarl.loop.scoring import ScoresByReward, Scoring
from megarl.megatron.worker_requests import ForwardRequest
from megarl.plan.simulation import SimulatedTime
from megarl.rollout.completions import Response, pack_chunk
from megarl.types import Layout, Prompt, Ragged, SampleInfo, Schedule, VersionSpan, WorkItem

SEED, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, CHUNKS = 5, 3, 2, 4
PROMPTS = [Prompt(prompt_id=f"p{index}", token_ids=(index, 7)) for index in range(11)]


@dataclass
class Work:
    finished: bool = False

    def finish(self) -> None:
        self.finished = True


@dataclass(eq=False)
class Running:
    """A response in progress: its number of tokens, when it began and ends, and how many tokens each version wrote."""

    tokens: int
    start: float
    seconds: float
    versions: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def written(self, now: float) -> int:
        return min(self.tokens, int(self.tokens * (now - self.start) / self.seconds)) if self.seconds else self.tokens

    def spans(self, engine: int) -> tuple[VersionSpan, ...]:
        starts = [start for start, _ in self.versions]
        return tuple(
            VersionSpan(start=start, stop=stop, version=version, engine_id=engine)
            for (start, version), stop in zip(self.versions, [*starts[1:], self.tokens], strict=True)
            if stop > start
        )


class Engines(RolloutGroup):
    """The real group; its processes answer after random times, some after long ones."""

    def __init__(
        self, clock: SimulatedTime, chance: random.Random, *, engines: int, mode: str, deaths: int = 0
    ) -> None:
        session: Any = SimpleNamespace(
            monitor=clock, launch_stepping=lambda *_, **__: object(), end=lambda process: None
        )
        rollout: Any = SimpleNamespace(devices=f"0-{engines - 1}", tp=1, engines=engines)
        super().__init__(session, rollout, "nowhere", vocab_size=10, device="cpu", replacements=deaths)
        self._clock, self._chance, self._mode = clock, chance, mode
        self.version = 0
        self.running: set[Running] = set()
        self.dead: list[Any] = []
        self.asked: list[tuple[Any, Any, list[Running]]] = []
        self._open(dict.fromkeys(range(engines), 3))

    def call_one(self, process: int, method: object, item: WorkItem, chunks: Sequence[int]) -> ChunkCall[Any, Any]:
        """Each token comes after a while; a chunk comes with its last token."""
        running = [self._begin(stable_hash(request.seed, "tokens") % 7 + 1) for request in item.requests]
        refs: dict[int, Any] = {}
        call = ChunkCall[Any, Any](
            label="generate",
            phase="rollout",
            processes=[self.processes[process]],
            done=[SimpleNamespace()],
            monitor=self.monitor,
            chunks=ChunkRefs(refs),
        )

        mine = self.processes[process]

        def finish() -> None:
            if mine in self.dead:
                return
            self.asked.remove((mine, call, running))
            self.running.difference_update(running)
            responses = [
                Response(
                    request=request,
                    token_ids=[stable_hash(request.seed, version) % 97 for version in versions_of(response, process)],
                    logprobs=[0.0] * response.tokens,
                    finished=True,
                    versions=response.spans(process),
                )
                for request, response in zip(item.requests, running, strict=True)
            ]
            infos, refs[item.chunk] = pack_chunk(item.chunk, responses)
            call.chunks._refs[item.chunk] = refs[item.chunk]
            call.results[0] = infos
            assert call.then is not None
            call.then()

        self.asked.append((mine, call, running))
        if self._replacements and self._chance.random() < 0.1:
            self._clock.after(self._chance.random(), lambda: self._die(mine))
        self._clock.after(max(response.seconds for response in running), finish)
        return call

    def _die(self, process: Any) -> None:
        """Ends a process, with which all its calls fail, unless it has answered everything."""
        calls = [(call, running) for mine, call, running in self.asked if mine is process]
        if process in self.dead or not calls or len(self.replaced) == self._replacements:
            return
        self.dead.append(process)
        for call, running in calls:
            self.running.difference_update(running)
            call.lost("an engine died.")

    def submit(self, method: Any, args: Any, kwargs: Any = None, chunks: Any = None, processes: Any = None) -> Any:
        """A new engine starts."""
        call = SimpleNamespace(results={0: 3}, then=None)
        self._clock.after(3 * self._chance.random(), lambda: call.then())
        return call

    def _begin(self, tokens: int) -> Running:
        seconds = self._chance.choice([0.0, 1.0, 1.0, 2.0, 20.0]) * self._chance.random()
        response = Running(tokens=tokens, start=self._clock.now, seconds=seconds, versions=[(0, self.version)])
        self.running.add(response)
        return response

    def sync(self, version: int) -> None:
        self.wait_for_replacements()
        assert self._mode == "inflight" or not self.running, "a sync while responses are in progress"
        for response in self.running:
            response.versions.append((response.written(self._clock.now), version))
        self.version = version
        self.readmit()

    def pick(self, rollouts: Rollouts, samples: Sequence[SampleInfo], chunks: int) -> Rollouts:
        from megarl.rollout.completions import sample_infos, select_rows

        rows = [(sample.chunk, sample.row) for sample in samples]
        chunk = select_rows(rollouts.chunks, rows)
        infos = sample_infos(0, chunk, [sample.prompt_id for sample in samples])
        return Rollouts(samples=tuple(infos), chunks=ChunkRefs({0: chunk}))  # pyright: ignore


def versions_of(response: Running, engine: int) -> list[int]:
    """The version of each token."""
    return [span.version for span in response.spans(engine) for _ in range(span.start, span.stop)]


class Scorer:
    """Scores a sample by its tokens, after a random time."""

    model = None

    def __init__(self, clock: SimulatedTime, chance: random.Random) -> None:
        self._clock, self._chance = clock, chance

    def score(self, rollouts: Rollouts, prompts: Mapping[str, Prompt], functions: object) -> Routine[Scoring]:
        assert {sample.prompt_id for sample in rollouts.samples} <= set(prompts)
        work = Work()
        self._clock.after(self._chance.random(), work.finish)
        yield work
        scores = [
            float(sum(rollouts.chunks[sample.chunk].response_ids[sample.row].tolist()) % 3)
            for sample in rollouts.samples
        ]
        return Scoring(samples=rollouts.samples, wait=lambda: {"rule": np.float32(scores)})


def differ(sources: ScoresByReward, samples: Sequence[SampleInfo]) -> Any:
    """Keeps prompts whose samples do not all score the same."""
    of_prompt: dict[str, set[float]] = {}
    for score, sample in zip(sources["rule"].tolist(), samples, strict=True):
        of_prompt.setdefault(sample.prompt_id, set()).add(score)
    return np.array([len(of_prompt[sample.prompt_id]) > 1 for sample in samples])


@dataclass(frozen=True, kw_only=True)
class Setup:
    staleness: int
    mode: str
    engines: int
    steps: int
    filtered: bool
    deaths: int = 0
    shared: bool = False
    greedy: bool = False
    parts: int = 1


class Devices:
    """The colocation of a run; the trainers work and the engines generate only where they have the devices."""

    def __init__(self, engines: Engines, *, shared: bool) -> None:
        self._engines, self.shared, self.training = engines, shared, True

    def to_training(self) -> None:
        assert not self.shared or not self._engines.running
        self.training = True

    def to_rollout(self) -> None:
        self.training = False

    def sync(self, version: int) -> None:
        assert self.training or not self.shared, "the engines have the devices already"
        self._engines.sync(version)
        self.training = False


class Role:
    """Answers at once: a token's number comes from the weights' version, and from what its sample is packed with.

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
            packs = {(row.chunk, row.row): pack for pack in rank.packs for row in pack}
            for index in rank.chunks:
                chunk = request.chunks[index]
                rows = range(len(chunk.response_ids))
                assert all((index, row) in packs for row in rows), "a chunk is not whole"
                seeds = [stable_hash(self.name, self.version, packs[index, row]) for row in rows]
                filled = zip(seeds, chunk.response_ids, strict=True)
                columns[index] = Ragged.from_rows([[seed % 1009] * len(ids) for seed, ids in filled], np.float32)
        refs: Any = columns
        return SimpleNamespace(chunks=ChunkRefs(refs))


class Simulation:
    """A run whose times come from `chance`."""

    def __init__(self, setup: Setup, chance: random.Random) -> None:
        self.setup, self.chance, self.clock = setup, chance, SimulatedTime()
        self.engines = Engines(self.clock, chance, engines=setup.engines, mode=setup.mode, deaths=setup.deaths)
        self.devices = Devices(self.engines, shared=setup.shared)
        config: Any = SimpleNamespace(
            run=SimpleNamespace(seed=SEED, steps=setup.steps),
            reward=SimpleNamespace(functions=()),
            data=SimpleNamespace(prompts_per_step=PROMPTS_PER_STEP, samples_per_prompt=SAMPLES_PER_PROMPT),
            rollout=SimpleNamespace(
                max_staleness=setup.staleness, mode=setup.mode, inference_parts=setup.parts, temperature=1.0
            ),
            algo=SimpleNamespace(
                filter=setup.filtered or None,
                kl=SimpleNamespace(reference_sync=None),
                correction=SimpleNamespace(old_logprobs="recompute"),
                old_logprobs_from_update=False,
            ),
            role=lambda name: SimpleNamespace(tokens_per_micro_batch=20),
        )
        names = ("actor", "critic", "reference")
        self.roles = {name: Role(name, lambda: bool(self.engines.running)) for name in names}
        roles: Any = self.roles
        self.passes = ForwardPasses(config, roles)
        devices: Any = self.devices
        scorer: Any = Scorer(self.clock, chance)
        dynamic = DynamicSampling(keep=differ, rounds=3) if setup.filtered else None
        begin = None if setup.filtered else self.passes.begin
        sampler = Sampler(
            config,
            PROMPTS,
            self.engines,
            scorer,
            devices,
            CHUNKS,
            dynamic=dynamic,
            greedy=setup.greedy,
            begin_forwards=begin,
        )
        self.buffer = RolloutBuffer(config, sampler, self.engines, devices)
        self.trained: dict[int, Sampled] = {}
        self.columns: dict[int, Mapping[str, Sequence[Sequence[float]]]] = {}
        """Of each step and pass, the values of each sample."""

    def begin(self, step: int = 0) -> None:
        self.devices.sync(step)
        self.buffer.begin(step)

    def step(self, step: int) -> None:
        """Trains on a step, and moves the weights where they are due."""
        self.trained[step] = sampled = self.buffer.take(step)
        forwards = self.passes.complete(sampled.rollouts, sampled.forwards)
        columns = {name: ChunkRefs[Ragged].of(part.chunks for part in parts) for name, parts in forwards.items()}
        self.columns[step] = {
            name: [column[sample.chunk][sample.row].tolist() for sample in sampled.rollouts.samples]
            for name, column in columns.items()
        }
        self.roles["actor"].version = self.roles["critic"].version = step
        assert self.devices.training or not self.setup.shared
        self.clock.work(self.chance.choice([0.1, 3.0]) * self.chance.random())
        if step < self.setup.steps and self.buffer.skips_sync(step):
            return
        self.buffer.prepare_sync()
        self.devices.sync(step)
        self.buffer.synced(step)


def content(sampled: Sampled) -> list[tuple[str, list[int], list[int]]]:
    """The id, tokens and versions of every sample."""
    found: list[tuple[str, list[int], list[int]]] = []
    for sample in sampled.rollouts.samples:
        chunk = sampled.rollouts.chunks[sample.chunk]
        versions = [span.version for span in chunk.versions[sample.row] for _ in range(span.start, span.stop)]
        found.append((sample.sample_id, chunk.response_ids[sample.row].tolist(), versions))
    return found
