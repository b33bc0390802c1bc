"""Engines divide the samples of a step and return them by reference."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import ray

from megarl.cluster.calls import WorkerError
from megarl.cluster.session import Session
from megarl.config.schema import Rollout
from megarl.groups.engines import RolloutGroup
from megarl.groups.rollouts import Rollouts
from megarl.stages.ppo.config import PPOConfig
from megarl.types import Prompt, SampleRequest
from tests.cluster.conftest import answer_of, kill
from tests.cluster.fakes import OPTIONS, FakeEngine

pytestmark = pytest.mark.process

MakeEngines = Callable[[str], Awaitable[RolloutGroup]]


@pytest.fixture(scope="module")
def make(session: Session, config: PPOConfig) -> Iterator[MakeEngines]:
    """Makes engines, one per device."""
    made: list[RolloutGroup] = []

    async def engines(devices: str) -> RolloutGroup:
        rollout = Rollout.model_validate({**config.rollout.model_dump(), "devices": devices})
        made.append(RolloutGroup(session, rollout, "nowhere", OPTIONS, engine=FakeEngine))
        await made[-1].start()
        return made[-1]

    yield engines
    kill(*made)


@pytest.fixture(scope="module")
def two(session: Session, make: MakeEngines) -> RolloutGroup:
    """Engines that have answered before, so that none is still starting when work is divided."""

    async def engines() -> RolloutGroup:
        made = await make("2-3")
        await made.generate(requests(2), 2).result()
        return made

    return session.run(engines())


def requests(count: int, first: Sequence[int] = ()) -> list[SampleRequest]:
    """Prompts that begin with the given ids; the other ids have no effect."""
    begins = [*first, *(i % 90 for i in range(len(first), count))]
    return [
        SampleRequest(sample_id=f"s{i}", prompt=Prompt(prompt_id=f"p{i}", token_ids=(begins[i], *range(i % 3))), seed=i)
        for i in range(count)
    ]


async def writers(engines: RolloutGroup, count: int, chunks: int) -> list[set[int]]:
    """The engine that answered, by chunk; checks that every sample is at the place in its info."""
    asked = requests(count)
    rollouts = await engines.generate(asked, chunks).result()
    assert [info.sample_id for info in rollouts.samples] == [request.sample_id for request in asked]
    for info, request in zip(rollouts.samples, asked, strict=True):
        chunk = rollouts.chunks[info.chunk]
        assert chunk.sample_ids[info.row] == info.sample_id
        assert tuple(chunk.prompt_ids[info.row]) == request.prompt.token_ids
    by_chunk = [rollouts.chunks[chunk] for chunk in range(len(rollouts.chunks))]
    sizes = [len(chunk.sample_ids) for chunk in by_chunk]
    assert max(sizes) - min(sizes) <= 1
    return [{spans[0].engine_id for spans in chunk.versions} for chunk in by_chunk]


@pytest.mark.parametrize(("samples", "chunks"), [(7, 4), (5, 16), (1, 8), (320, 160)])
async def test_every_sample_is_at_the_place_in_its_info(two: RolloutGroup, samples: int, chunks: int) -> None:
    by_chunk = await writers(two, samples, chunks)
    assert len(by_chunk) == min(samples, chunks)
    assert all(len(engines) == 1 for engines in by_chunk), "a chunk has two writers"
    assert samples < 320 or set.union(*by_chunk) == {0, 1}, "one engine writes all"


async def test_engine_throughput_is_measured_since_the_last_reading(two: RolloutGroup) -> None:
    two.take_metrics()
    start = time.perf_counter()
    rollouts = await two.generate(requests(8), 4).result()
    took = time.perf_counter() - start
    metrics = two.take_metrics()
    tokens = sum(sample.response_tokens for sample in rollouts.samples)
    assert metrics["perf/rollout_tokens_per_second"] >= tokens / took
    speeds = metrics["perf/engine_tokens_per_second_min"], metrics["perf/engine_tokens_per_second_max"]
    assert speeds[0] <= speeds[1]
    # All tokens over the seconds of the busiest engine: at least its own speed, which need not be the higher one.
    assert speeds[0] <= metrics["perf/rollout_tokens_per_second"] <= sum(speeds)
    assert 0 <= metrics["rollout/engine_idle"] < 1
    assert two.take_metrics() == {"rollout/engine_idle": 1}


async def test_samples_of_two_rounds_are_selected_without_sending_tokens_to_the_driver(two: RolloutGroup) -> None:
    rounds = [await two.generate(requests(count), chunks).result() for count, chunks in ((7, 4), (5, 2))]
    joined = Rollouts.joined(rounds)
    assert [(info.sample_id, info.prompt_tokens) for info in joined.samples] == [
        (info.sample_id, info.prompt_tokens) for part in rounds for info in part.samples
    ]
    kept = [joined.samples[index] for index in (10, 1, 2, 11, 6)]
    picked = await two.pick(joined, kept, 3)
    assert len(picked.chunks) == 3
    assert [info.sample_id for info in picked.samples] == [info.sample_id for info in kept]
    for info, old in zip(picked.samples, kept, strict=True):
        assert picked.chunks[info.chunk].sample_ids[info.row] == info.sample_id
        assert len(picked.chunks[info.chunk].response_ids[info.row]) == info.response_tokens == old.response_tokens
    names = ["a", "a#1", "a#2", "b", "c", "c#1"]
    branches = [replace(sample, sample_id=name) for sample, name in zip(joined.samples, names, strict=False)]
    picked = await two.pick(joined, branches, 6)
    assert [info.chunk for info in picked.samples] == [0, 0, 0, 1, 2, 2], "the branches of a conversation stay together"


async def test_a_scorer_gets_truncated_responses(two: RolloutGroup) -> None:
    """The fake engines answer 7 0 1 and the like: with their prompt."""
    rollouts = await two.generate(requests(6), 3).result()
    seen = await two.truncate(rollouts, 0, 1)
    for info, old in zip(seen.samples, rollouts.samples, strict=True):
        ids = rollouts.chunks[old.chunk].response_ids[old.row].tolist()
        found = 0 in ids[1:]
        assert info.finished is found
        assert seen.chunks[info.chunk].response_ids[info.row].tolist() == (ids[:2] if found else ids)
        assert info.response_tokens == (2 if found else len(ids))
    assert [info.finished for info in seen.samples] == [False, True, True, False, True, True]


@pytest.mark.usefixtures("drop_broken_calls")
async def test_another_engine_copies_and_truncates_for_one_that_dies(
    session: Session, config: PPOConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """It dies while it is idle; the calls detect that."""
    rollout = Rollout.model_validate({**config.rollout.model_dump(), "devices": "2-3"})
    engines = RolloutGroup(session, rollout, "nowhere", OPTIONS, engine=FakeEngine, replacements=2)
    await engines.start()
    rollouts = await engines.generate(requests(6), 3).result()
    ray.kill(engines.processes[0].actor)
    picked = await engines.pick(rollouts, rollouts.samples[::-1], 4)
    assert [sample.sample_id for sample in picked.samples] == [f"s{i}" for i in range(5, -1, -1)]
    assert all(picked.chunks[info.chunk].sample_ids[info.row] == info.sample_id for info in picked.samples)
    ray.kill(engines.processes[1].actor)  # none with weights is left, and the first may still be starting
    seen = await engines.truncate(picked, 0, 1)
    assert [sample.finished for sample in seen.samples] == [True, True, False, True, True, False]
    causes = [cause.splitlines()[0] for cause in engines.replaced]
    assert causes == ["rollout engine 0 died in rollout.pick.", "rollout engine 1 died in rollout.truncate."]
    assert capfd.readouterr().err.count("It is replaced") == 2
    kill(engines)


async def test_engines_take_work_as_they_have_room(two: RolloutGroup) -> None:
    """An engine delayed by an item holds as many as it has room for, and leaves the rest to the other."""
    hold_up = requests(17, first=[97])
    rollouts = await two.generate(hold_up, 17).result()
    answered = [rollouts.chunks[chunk].versions[0][0].engine_id for chunk in range(17)]
    assert answered.count(answered[0]) == 2
    assert len(set(answered)) == 2


async def test_more_engines_give_the_same_samples(make: MakeEngines, two: RolloutGroup) -> None:
    one = await make("2")
    alone, together = [await engines.generate(requests(20), 6).result() for engines in (one, two)]
    assert alone.samples == together.samples
    for chunk in range(6):
        for column in ("sample_ids", "response_ids"):
            first, second = (getattr(rollouts.chunks[chunk], column) for rollouts in (alone, together))
            assert [list(row) for row in first] == [list(row) for row in second]


async def test_items_wait_for_engines_that_are_starting(session: Session, config: PPOConfig) -> None:
    engines = RolloutGroup(session, config.rollout, "nowhere", OPTIONS, engine=FakeEngine)
    pending = engines.generate(requests(5), 3)
    starting = engines.spawn(engines.start())
    rollouts = await pending.result()
    assert [info.sample_id for info in rollouts.samples] == [f"s{i}" for i in range(5)]
    await starting
    kill(engines)


async def test_the_driver_continues_while_engines_generate(two: RolloutGroup) -> None:
    """Rollouts of several requests are in progress together; paused engines finish only what they have."""
    first, second = two.generate(requests(30), 15), two.generate(requests(4), 2)
    assert not any(answer.done() for answer in first.answers)
    await two.hold([0, 1], drain=True)
    assert 0 < sum(answer.done() for answer in first.answers) < 15
    assert not all(answer.done() for answer in second.answers)
    two.readmit([0, 1])
    assert [len((await pending.result()).samples) for pending in (first, second)] == [30, 4]


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (
            99,
            r"(?s)rollout engine \d failed in rollout.generate: ArithmeticError\('the prompt is a teapot'\).*fakes.py",
        ),
        (98, r"rollout engine \d died in rollout.generate"),
    ],
    ids=["fails", "dies"],
)
@pytest.mark.usefixtures("drop_broken_calls")
def test_a_failure_is_raised_while_other_engines_work(
    session: Session, make: MakeEngines, token: int, message: str
) -> None:
    engines = session.run(answer_of(lambda: make("2-3")))
    session.run(answer_of(lambda: engines.generate(requests(4), 4).result()))
    start = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        session.run(answer_of(lambda: engines.generate(requests(3000, first=[0, 1, token]), 3000).result()))
    assert time.monotonic() - start < 30, "the other engine alone takes 60 s"
