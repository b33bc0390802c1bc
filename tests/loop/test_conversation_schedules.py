"""Conversations in simulated time: no turn exceeds the staleness bound, and each conversation is trained on once."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.calls import Call
from megarl.conversations.environment_process import TurnRequest
from megarl.errors import RunError
from megarl.groups.conversations import ConversationGroup
from megarl.groups.engines import Turn
from megarl.types import Pickled, Prompt, SampleRequest, TurnAnswer
from tests.loop import answers
from tests.loop.answers import Answered
from tests.loop.simulated_conversations import Conversations
from tests.loop.simulated_engines import Engines
from tests.loop.simulated_time import SimulatedMonitor, SimulatedTime
from tests.loop.simulation import Setup, Simulation, assert_trained_once, content, oldest, resumed, run, saved, trained
from tests.unit_profile import fewer

STEPS, SCHEDULES = 5, fewer(9)
MODES = [("exact", 0), ("exact", 1), ("exact", 2), ("bounded", 1), ("bounded", 3), ("inflight", 1), ("inflight", 3)]


pytestmark = pytest.mark.usefixtures("references_are_values")


def of(mode: str, staleness: int, seed: int, **settings: bool | int) -> Setup:
    engines = 1 + seed % 3
    return Setup(staleness=staleness, mode=mode, engines=engines, steps=STEPS, conversations=True, **settings)


def assert_as_sampled(simulation: Simulation) -> Counter[str]:
    """Compares each conversation with its turns as the engines recorded them; counts what versions they have."""
    counts = Counter[str]()
    for sampled in simulation.trained.values():
        for (sample_id, ids, versions), sample in zip(content(sampled), sampled.rollouts.samples, strict=True):
            expected: list[int] = []
            of_tokens: list[int] = []
            turns = 0
            while (turn := simulation.engines.recorded.get(f"{sample_id}/turn-{turns}")) is not None:
                read = [abs(token) for token in ids[: len(turn.request.prompt.token_ids) - sample.prompt_tokens]]
                assert list(turn.request.prompt.token_ids[sample.prompt_tokens :]) == read
                expected += [-token for token in turn.request.prompt.token_ids[sample.prompt_tokens + len(expected) :]]
                expected += turn.token_ids
                own = [span.version for span in turn.versions for _ in range(span.start, span.stop)]
                of_tokens += own
                counts["turns of several versions"] += len(set(own)) > 1
                turns += 1
            assert (ids, versions) == (expected, of_tokens)
            assert sample.outcome is not None
            assert (sample.outcome.turns, sample.outcome.failure) == (turns, None)
            counts["of several versions"] += len(set(versions)) > 1
            counts["turns"] += turns
    return counts


def assert_over(simulation: Simulation) -> None:
    """Nothing is in progress, and no call has been forgotten."""
    assert isinstance(simulation.generator, Conversations)
    simulation.monitor.work(30.0)
    assert not simulation.engines.running
    assert not simulation.generator.unanswered


@pytest.mark.parametrize(("mode", "staleness"), MODES)
def test_conversations_keep_the_bound_and_are_trained_as_sampled(mode: str, staleness: int) -> None:
    counts, age, expected = Counter[str](), 0, None
    for seed in range(SCHEDULES):
        blocking = staleness == 0 or seed % 4 == 0
        simulation = run(of(mode, staleness, seed, evaluates=seed % 2 == 0, blocking=blocking), seed)
        counts += assert_as_sampled(simulation)
        age = max(age, oldest(simulation))
        assert_trained_once(simulation)
        expected = expected or trained(simulation)
        assert mode != "exact" or trained(simulation) == expected, f"schedule {seed} differs"
        assert_over(simulation)
    assert age == staleness
    assert counts["turns"] > 2 * SCHEDULES * STEPS * 6
    assert (counts["of several versions"] > 0) == (mode != "exact")
    assert (counts["turns of several versions"] > 0) == (mode == "inflight")


@pytest.mark.parametrize(("mode", "staleness"), MODES[1:])
def test_turns_of_engines_that_die_are_asked_again(mode: str, staleness: int) -> None:
    replaced, expected, messages = 0, None, list[str]()
    for seed in range(SCHEDULES):
        setup = of(mode, staleness, seed + 1, losses=3, rolling=mode != "exact" and seed % 2 == 0)
        simulation = Simulation(setup, random.Random(seed))
        try:
            simulation.train()
        except RunError as error:
            messages.append(str(error))
            continue
        assert_as_sampled(simulation)
        assert oldest(simulation) <= staleness
        expected = expected or trained(simulation)
        assert mode != "exact" or trained(simulation) == expected
        replaced += len(simulation.engines.replaced)
        assert_over(simulation)
    assert replaced > SCHEDULES / 2
    assert all(mode == "exact" and "No engine is left with version" in message for message in messages)


@pytest.mark.parametrize(("mode", "staleness"), MODES[1:])
def test_a_run_resumes_with_conversations_in_progress(tmp_path: Path, mode: str, staleness: int) -> None:
    """Those of the checkpoint are not held again; others begin anew, and keep the bound."""
    straight, begun = trained(run(of(mode, staleness, 1), 0)), 0
    for seed in range(SCHEDULES):
        step, directory = 1 + seed % (STEPS - 1), tmp_path / str(seed)
        first, state = saved(of(mode, staleness, 1), seed, step, directory)
        begun += len(first.buffer._in_progress)
        again = resumed(of(mode, staleness, seed), seed + 1000, step, state, directory)
        assert oldest(again) <= staleness
        assert_trained_once(first, again)
        assert mode != "exact" or trained(first, again) == straight
    assert begun > 0


def test_the_time_limit_begins_again_with_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    restarted: list[Call[Any]] = []
    monkeypatch.setattr(Call, "restart_limit", lambda call: restarted.append(call))
    simulation = Simulation(of("inflight", 1, 0), random.Random(0))
    simulation.begin()
    assert isinstance(simulation.generator, Conversations)
    call = next(call for call in simulation.generator.unanswered if call.label == "generate")
    assert not restarted
    while not simulation.engines.recorded:
        simulation.monitor.work(0.1)
    simulation.monitor.work(1.0)
    assert not call.finished
    assert call in restarted


def test_a_turn_goes_to_the_engine_with_its_prefix_unless_that_has_too_many_tokens() -> None:
    monitor = SimulatedMonitor(SimulatedTime())
    engines = Engines(monitor, random.Random(0), engines=3, mode="exact", losses=0, start_s=0.0)
    engines.versions = dict.fromkeys(engines.processes, 0)
    engines.turns_answered = lambda _answers, _process: None
    engines._room = [99] * 3

    def taken_by(prompt: int, engine: int | None = None) -> int:
        before = list(engines._load.responses)
        ids = tuple(range(prompt))
        request = SampleRequest(sample_id="1/a/0/turn-0", prompt=Prompt(prompt_id="a", token_ids=ids), seed=0)
        turn = TurnRequest(number=0, conversation="1/a/0", tokens=prompt + 7, request=Pickled.of(request))
        engines.sample([Turn(request=turn, process=0, engine=engine)])
        return next(index for index in range(3) if engines._load.responses[index] > before[index])

    async def sample() -> None:
        assert [taken_by(93), taken_by(33), taken_by(33), taken_by(33)] == [0, 1, 2, 1], "100, 80 and 40 tokens"
        assert taken_by(13, engine=0) == 0, "100 is at most twice 40 and 20"
        assert taken_by(3, engine=0) == 2, "120 is more than twice 40 and 10"

    monitor.drive(sample())
    monitor.work(30.0)
    assert engines._load.tokens == [0, 0, 0]


def test_the_next_turn_of_a_conversation_asks_for_the_engine_of_the_last() -> None:
    asked: list[Turn] = []
    engines: Any = SimpleNamespace(index=["first", "second"].index, sample=asked.extend)
    group: Any = object.__new__(ConversationGroup)
    group._engines, group._engine_of, group.processes = engines, {}, ["environments"]
    group._sampling, group._running = set(), [set()]
    group.call_at = lambda *_: None
    request = Pickled.of(SampleRequest(sample_id="", prompt=Prompt(prompt_id="", token_ids=(1,)), seed=0))

    def submit(*_: Any, **__: Any) -> Answered:
        group._running[0].clear()
        return Answered([TurnRequest(number=7, conversation=name, tokens=9, request=request) for name in "ab"])

    group.submit = submit
    for _ in range(2):
        group._running[0].add("item")
        group._sampling.add(0)
        answers.run(group._sample(0))
        group._answer([(asked[0], TurnAnswer(number=7, tokens=1, turn=Pickled.of("turn")))], "second")
    assert [turn.engine for turn in asked] == [None, None, 1, None], "the second conversation has no turn yet"
