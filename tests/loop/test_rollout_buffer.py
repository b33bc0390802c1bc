"""Thousands of runs in simulated time: samples do not depend on timing, are never too old, and always arrive."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.errors import RunError
from megarl.groups.rollouts import Rollouts
from megarl.loop.scoring import ScoredSamples
from tests.loop.simulation import (
    Scorer,
    Setup,
    Simulation,
    ages,
    assert_trained_once,
    oldest,
    resumed,
    run,
    saved,
    trained,
)
from tests.unit_profile import fewer

pytestmark = pytest.mark.usefixtures("references_are_values")

STEPS, SCHEDULES = 6, fewer(60)


@pytest.mark.parametrize("filtered", [False, True], ids=["whole", "filtered"])
@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("mode", ["bounded", "inflight"])
def test_no_token_exceeds_the_staleness_bound(mode: str, staleness: int, *, filtered: bool) -> None:
    age, spanning = 0, 0
    for seed in range(SCHEDULES):
        setup = Setup(staleness=staleness, mode=mode, engines=1 + seed % 3, filtered=filtered)
        simulation = run(setup, seed)
        age = max(age, oldest(simulation))
        spanning += sum(len(set(versions)) > 1 for samples in trained(simulation) for _, _, versions in samples)
        assert_trained_once(simulation)
        assert simulation.buffer.depth == 0
        assert not simulation.engines.running, "every response is trained on"
    assert age == staleness, "no schedule comes up to the bound"
    assert (spanning > 0) == (mode == "inflight")


def test_scores_that_are_not_finite_are_saved_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward of an environment may exceed the range of float32. Training takes both for no score."""
    scores = {"rule": np.array([np.inf, np.nan, 0.1, -np.inf, 2.0, 3.0], np.float32)}

    async def score(_: Scorer, rollouts: Rollouts, *__: object) -> ScoredSamples:
        return ScoredSamples(samples=rollouts.samples, scores=scores)

    monkeypatch.setattr(Scorer, "score", score)
    setup = Setup(staleness=1, engines=1, steps=2)
    first = Simulation(setup, random.Random(0)).train(last=1)
    state = json.loads(json.dumps(first.buffer.state(tmp_path), allow_nan=False))
    again = resumed(setup, 1, 1, state, tmp_path)
    expected = np.array([np.nan, np.nan, 0.1, np.nan, 2.0, 3.0], np.float32)
    np.testing.assert_array_equal(again.trained[2].scoring.result().scores["rule"], expected)


@pytest.mark.parametrize("mode", ["bounded", "inflight"])
def test_a_resumed_run_keeps_the_staleness_bound(tmp_path: Path, mode: str) -> None:
    for seed in range(SCHEDULES):
        setup = Setup(staleness=2, mode=mode, filtered=seed % 2 == 0)
        step = 1 + seed % (STEPS - 1)
        first, state = saved(setup, seed, step, tmp_path / str(seed))
        again = resumed(setup, seed + 1000, step, state, tmp_path / str(seed))
        assert oldest(again) <= 2
        assert_trained_once(first, again)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_engines_do_not_generate_while_trainers_use_shared_devices(tmp_path: Path, staleness: int) -> None:
    setups = [Setup(staleness=staleness, engines=1, filtered=True, shared=shared) for shared in (True, False)]
    shared, own = (run(setup, 3) for setup in setups)
    assert trained(shared) == trained(own)
    _, state = saved(setups[0], 1, 3, tmp_path / "saved")
    assert trained(resumed(setups[0], 2, 3, state, tmp_path / "saved")) == trained(own)[3:]


MODES = [("exact", 0), ("exact", 1), ("exact", 3), ("bounded", 1), ("bounded", 3), ("inflight", 1), ("inflight", 3)]


@pytest.mark.parametrize(("mode", "staleness"), MODES)
def test_engines_that_die_or_hang_are_replaced(mode: str, staleness: int) -> None:
    """An exact run stays the same, unless no engine is left with its version: then it ends with a message."""
    expected, messages, ills = dict[bool, Any](), list[str](), Counter[str]()
    for seed in range(2 * SCHEDULES):
        engines, filtered, losses = 1 + seed % 3, seed % 4 > 1, 3 if seed not in (0, 2) else 0
        setup = Setup(
            staleness=staleness, mode=mode, engines=engines, filtered=filtered, losses=losses, evaluates=seed % 2 == 0
        )
        simulation = Simulation(setup, random.Random(seed))
        try:
            simulation.train()
        except RunError as error:
            messages.append(str(error))
        else:
            assert_trained_once(simulation)
            assert oldest(simulation) <= staleness
            found = trained(simulation)
            assert mode != "exact" or found == expected.setdefault(filtered, found)
        ills.update(cause.partition(":")[0].split()[0] for cause in simulation.engines.replaced)
    kinds = {"start", "connect", "receive_weights", "generate", "pick"}
    assert set(ills) == kinds or (SCHEDULES < 60 and set(ills) < kinds), "there are schedules of every kind"
    assert ills.total() > 2 * SCHEDULES
    assert all("No engine is left with version" in message for message in messages)
    assert bool(messages) == (mode == "exact" and staleness > 0)


@pytest.mark.parametrize(("mode", "staleness"), [each for each in MODES if each[1]])
def test_an_evaluation_in_the_background_does_not_stop_the_training(mode: str, staleness: int) -> None:
    """Each has a result, in their order; an exact run stays the same, and evaluates the weights of a single version."""
    late, spanning, expected = 0, 0, None
    for seed in range(SCHEDULES // 2):
        setups = [
            Setup(staleness=staleness, mode=mode, engines=3, losses=seed % 2, evaluates=evaluates, blocking=False)
            for evaluates in ((True, False) if expected is None else (True,))
        ]
        simulation, *alone = (run(setup, seed) for setup in setups)
        expected = expected or trained(alone[0])
        assert mode != "exact" or trained(simulation) == expected
        assert oldest(simulation) <= staleness
        results = [result for _, result in simulation.evaluated]
        assert [result.step for result in results] == sorted({*simulation.synced})
        assert results[-1].step == STEPS
        for result in results:
            versions = [result.metrics[name] for name in ("eval/version", "oldest", "newest", "eval/version_end")]
            assert versions == sorted(versions)
            assert versions[0] == result.step
            spanning += versions[-1] > versions[0]
        late += sum(after > result.step for after, result in simulation.evaluated)
    assert late > 0
    assert (spanning > 0) == (mode != "exact")


@pytest.mark.parametrize("rolling", [False, True], ids=["together", "rolling"])
@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("mode", ["bounded", "inflight"])
def test_half_of_the_engines_generate_while_the_other_half_is_updated(
    mode: str, staleness: int, *, rolling: bool
) -> None:
    age, begun = 0, 0
    for seed in range(SCHEDULES):
        setup = Setup(
            staleness=staleness,
            mode=mode,
            engines=2 + seed % 3,
            filtered=seed % 4 < 2,
            losses=2 * (seed % 2),
            evaluates=seed % 8 < 4,
            rolling=rolling,
        )
        simulation = run(setup, seed)
        assert_trained_once(simulation)
        age = max(age, oldest(simulation))
        begun += simulation.engines.begun_in_syncs
    assert age == staleness
    assert (begun > 0) == rolling


@pytest.mark.parametrize(("mode", "staleness"), MODES)
def test_no_step_waits_for_a_new_engine_while_another_works(mode: str, staleness: int) -> None:
    replaced = 0
    for seed in range(SCHEDULES):
        setup = Setup(staleness=staleness, mode=mode, engines=3, losses=2, start_s=1e5, evaluates=True)
        simulation = run(setup, seed)
        replaced += len(simulation.engines.replaced)
        assert simulation.clock.now < 1e4
    assert replaced > SCHEDULES / 2


@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 0), (1, 4)])
def test_a_changed_staleness_applies_from_the_resume_on(tmp_path: Path, before: int, after: int) -> None:
    for seed in range(SCHEDULES // 3):
        mode = "inflight" if seed % 2 else "exact"
        setup = Setup(staleness=before, mode=mode, filtered=True)
        _, state = saved(setup, seed, 1, tmp_path / str(seed))
        changed = Simulation(Setup(staleness=after, filtered=True), random.Random(seed))
        changed.load(state, tmp_path / str(seed))
        again = changed.buffer.state(tmp_path / f"again {seed}")
        assert again["drawn"] == state["drawn"], "prompts that were drawn are not lost with a second checkpoint"
        assert oldest(changed.train(after=1)) <= after


@pytest.mark.parametrize("changed", ["sampling", "format"])
def test_samples_of_another_distribution_or_format_are_generated_again(tmp_path: Path, changed: str) -> None:
    """Log-probabilities of another temperature are not the trainers'; older checkpoints have scores by branch."""
    setup = Setup(staleness=2)
    _, state = saved(setup, 0, 1, tmp_path)
    assert state["sampled"]
    temperature, *others = state["sampling"]
    another = {"sampling": [temperature / 2, *others], "format": None}
    kept = Simulation(setup, random.Random(0))
    kept.load(state, tmp_path)
    assert {str(step) for step in kept.buffer._loaded} == state["sampled"].keys()
    other = Simulation(setup, random.Random(0))
    other.load({**state, changed: another[changed]}, tmp_path)
    assert not other.buffer._loaded
    assert oldest(other.train(after=1)) <= 2


def test_a_run_that_goes_on_beyond_its_end_samples_with_the_newest_weights(tmp_path: Path) -> None:
    setup = Setup(staleness=2, steps=3)
    _, state = saved(setup, 0, 3, tmp_path)
    longer = resumed(replace(setup, steps=STEPS), 1, 3, state, tmp_path)
    assert [set(ages(step, longer.trained[step])) for step in (4, 5, 6)] == [{0}, {1}, {2}]
