"""Thousands of runs in simulated time: samples do not depend on timing, are never too old, and always arrive."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.cluster import ray_api
from megarl.errors import RunError
from megarl.groups.rollouts import Rollouts
from megarl.loop.sampler import Sampled
from megarl.loop.scoring import ScoredSamples
from tests.loop.simulation import Scorer, Setup, Simulation, content
from tests.unit_profile import fewer

STEPS, SCHEDULES = 6, fewer(60)


@pytest.fixture(autouse=True)
def references_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no object store."""
    monkeypatch.setattr(ray_api, "get", lambda ref: ref)
    monkeypatch.setattr(ray_api, "put", lambda value: value)


def run(setup: Setup, seed: int) -> Simulation:
    simulation = Simulation(setup, random.Random(seed))
    simulation.begin()
    for step in range(1, setup.steps + 1):
        simulation.step(step)
    return simulation


def trained(simulation: Simulation) -> list[list[tuple[str, list[int], list[int]]]]:
    return [content(simulation.trained[step]) for step in sorted(simulation.trained)]


def ages(step: int, sampled: Sampled) -> list[int]:
    """How many versions older than the actor each token is when it is trained on."""
    return [step - 1 - version for _, _, versions in content(sampled) for version in versions]


@pytest.mark.parametrize("filtered", [False, True], ids=["whole", "filtered"])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_an_exact_run_does_not_depend_on_timing_or_engines(staleness: int, *, filtered: bool) -> None:
    expected = None
    for seed in range(SCHEDULES):
        setup = Setup(staleness=staleness, mode="exact", engines=1 + seed % 3, steps=STEPS, filtered=filtered)
        found = trained(run(setup, seed))
        expected = expected or found
        assert found == expected, f"schedule {seed} differs"
    assert expected is not None
    for step, samples in enumerate(expected, start=1):
        assert {version for _, _, versions in samples for version in versions} == {max(0, step - 1 - staleness)}


@pytest.mark.parametrize("filtered", [False, True], ids=["whole", "filtered"])
@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("mode", ["bounded", "inflight"])
def test_no_token_exceeds_the_staleness_bound(mode: str, staleness: int, *, filtered: bool) -> None:
    oldest, spanning = 0, 0
    for seed in range(SCHEDULES):
        setup = Setup(staleness=staleness, mode=mode, engines=1 + seed % 3, steps=STEPS, filtered=filtered)
        simulation = run(setup, seed)
        for step, sampled in simulation.trained.items():
            oldest = max(oldest, *ages(step, sampled))
            spanning += sum(len(set(versions)) > 1 for _, _, versions in content(sampled))
        ids = [sample_id for samples in trained(simulation) for sample_id, _, _ in samples]
        assert len(ids) == len(set(ids)) == STEPS * len(simulation.trained[1].rollouts.samples)
        assert simulation.buffer.depth == 0
        assert not simulation.engines.running, "every response is trained on"
    assert oldest == staleness, "no schedule comes up to the bound"
    assert (spanning > 0) == (mode == "inflight")


@pytest.mark.parametrize("filtered", [False, True], ids=["whole", "filtered"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_an_exact_run_resumed_from_any_checkpoint_equals_the_uninterrupted_run(
    tmp_path: Path, staleness: int, *, filtered: bool
) -> None:
    setup = Setup(staleness=staleness, mode="exact", engines=2, steps=STEPS, filtered=filtered)
    straight = trained(run(setup, 0))
    for seed in range(SCHEDULES // 3):
        saved = 1 + seed % (STEPS - 1)
        first = Simulation(setup, random.Random(seed))
        first.begin()
        for step in range(1, saved + 1):
            first.step(step)
        first.monitor.work(first.chance.random())
        directory = tmp_path / str(seed)
        state = first.buffer.state(directory)
        assert bool(state.get("sampled")) == directory.exists()
        resumed = Simulation(setup, random.Random(seed + 1000))
        resumed.load(state, directory)
        resumed.begin(saved)
        for step in range(saved + 1, STEPS + 1):
            resumed.step(step)
        assert trained(resumed) == straight[saved:], f"schedule {seed} differs after step {saved}"


def test_scores_that_are_not_finite_are_saved_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward of an environment may exceed the range of float32. Training takes both for no score."""
    scores = {"rule": np.array([np.inf, np.nan, 0.1, -np.inf, 2.0, 3.0], np.float32)}

    async def score(_: Scorer, rollouts: Rollouts, *__: object) -> ScoredSamples:
        return ScoredSamples(samples=rollouts.samples, scores=scores)

    monkeypatch.setattr(Scorer, "score", score)
    first = Simulation(Setup(staleness=1, mode="exact", engines=1, steps=2, filtered=False), random.Random(0))
    first.begin()
    first.step(1)
    state = json.loads(json.dumps(first.buffer.state(tmp_path), allow_nan=False))
    resumed = Simulation(first.setup, random.Random(1))
    resumed.load(state, tmp_path)
    resumed.begin(1)
    resumed.step(2)
    expected = np.array([np.nan, np.nan, 0.1, np.nan, 2.0, 3.0], np.float32)
    np.testing.assert_array_equal(resumed.trained[2].scoring.result().scores["rule"], expected)


@pytest.mark.parametrize("mode", ["bounded", "inflight"])
def test_a_resumed_run_keeps_the_staleness_bound(tmp_path: Path, mode: str) -> None:
    for seed in range(SCHEDULES):
        setup = Setup(staleness=2, mode=mode, engines=2, steps=STEPS, filtered=seed % 2 == 0)
        saved = 1 + seed % (STEPS - 1)
        first = Simulation(setup, random.Random(seed))
        first.begin()
        for step in range(1, saved + 1):
            first.step(step)
        state = first.buffer.state(tmp_path / str(seed))
        resumed = Simulation(setup, random.Random(seed + 1000))
        resumed.load(state, tmp_path / str(seed))
        resumed.begin(saved)
        for step in range(saved + 1, STEPS + 1):
            resumed.step(step)
            assert max(ages(step, resumed.trained[step])) <= 2
        ids = [sample_id for each in (first, resumed) for samples in trained(each) for sample_id, _, _ in samples]
        assert len(ids) == len(set(ids)) == STEPS * 6


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_engines_do_not_generate_while_trainers_use_shared_devices(tmp_path: Path, staleness: int) -> None:
    setups = [
        Setup(staleness=staleness, mode="exact", engines=1, steps=STEPS, filtered=True, shared=shared)
        for shared in (True, False)
    ]
    shared, own = (run(setup, 3) for setup in setups)
    assert trained(shared) == trained(own)
    first = Simulation(setups[0], random.Random(1))
    first.begin()
    for step in (1, 2, 3):
        first.step(step)
    resumed = Simulation(setups[0], random.Random(2))
    resumed.load(first.buffer.state(tmp_path / "saved"), tmp_path / "saved")
    resumed.begin(3)
    for step in range(4, STEPS + 1):
        resumed.step(step)
    assert trained(resumed) == trained(own)[3:]


MODES = [("exact", 0), ("exact", 1), ("exact", 3), ("bounded", 1), ("bounded", 3), ("inflight", 1), ("inflight", 3)]


@pytest.mark.parametrize(("mode", "staleness"), MODES)
def test_engines_that_die_or_hang_are_replaced(mode: str, staleness: int) -> None:
    """An exact run stays the same, unless no engine is left with its version: then it ends with a message."""
    expected, messages, ills = dict[bool, Any](), list[str](), Counter[str]()
    for seed in range(2 * SCHEDULES):
        engines, filtered, losses = 1 + seed % 3, seed % 4 > 1, 3 if seed not in (0, 2) else 0
        setup = Setup(
            staleness=staleness,
            mode=mode,
            engines=engines,
            steps=STEPS,
            filtered=filtered,
            losses=losses,
            evaluates=seed % 2 == 0,
        )
        simulation = Simulation(setup, random.Random(seed))
        simulation.begin()
        try:
            for step in range(1, STEPS + 1):
                simulation.step(step)
        except RunError as error:
            messages.append(str(error))
        else:
            ids = [sample_id for samples in trained(simulation) for sample_id, _, _ in samples]
            assert len(ids) == len(set(ids)) == STEPS * 6
            assert all(max(ages(step, each)) <= staleness for step, each in simulation.trained.items())
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
            Setup(
                staleness=staleness,
                mode=mode,
                engines=3,
                steps=STEPS,
                filtered=False,
                losses=seed % 2,
                evaluates=evaluates,
                blocking=False,
            )
            for evaluates in ((True, False) if expected is None else (True,))
        ]
        simulation, *alone = (run(setup, seed) for setup in setups)
        expected = expected or trained(alone[0])
        assert mode != "exact" or trained(simulation) == expected
        assert all(max(ages(step, each)) <= staleness for step, each in simulation.trained.items())
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
    oldest, begun = 0, 0
    for seed in range(SCHEDULES):
        setup = Setup(
            staleness=staleness,
            mode=mode,
            engines=2 + seed % 3,
            steps=STEPS,
            filtered=seed % 4 < 2,
            losses=2 * (seed % 2),
            evaluates=seed % 8 < 4,
            rolling=rolling,
        )
        simulation = run(setup, seed)
        ids = [sample_id for samples in trained(simulation) for sample_id, _, _ in samples]
        assert len(ids) == len(set(ids)) == STEPS * 6
        oldest = max(oldest, *(max(ages(step, each)) for step, each in simulation.trained.items()))
        begun += simulation.engines.begun_in_syncs
    assert oldest == staleness
    assert (begun > 0) == rolling


@pytest.mark.parametrize(("mode", "staleness"), MODES)
def test_no_step_waits_for_a_new_engine_while_another_works(mode: str, staleness: int) -> None:
    replaced = 0
    for seed in range(SCHEDULES):
        setup = Setup(
            staleness=staleness,
            mode=mode,
            engines=3,
            steps=STEPS,
            filtered=False,
            losses=2,
            start_s=1e5,
            evaluates=True,
        )
        simulation = run(setup, seed)
        replaced += len(simulation.engines.replaced)
        assert simulation.clock.now < 1e4
    assert replaced > SCHEDULES / 2


@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 0), (1, 4)])
def test_a_changed_staleness_applies_from_the_resume_on(tmp_path: Path, before: int, after: int) -> None:
    for seed in range(SCHEDULES // 3):
        first = Simulation(
            Setup(staleness=before, mode="inflight" if seed % 2 else "exact", engines=2, steps=STEPS, filtered=True),
            random.Random(seed),
        )
        first.begin()
        first.step(1)
        state = first.buffer.state(tmp_path / str(seed))
        resumed = Simulation(
            Setup(staleness=after, mode="exact", engines=2, steps=STEPS, filtered=True), random.Random(seed)
        )
        resumed.load(state, tmp_path / str(seed))
        again = resumed.buffer.state(tmp_path / f"again {seed}")
        assert again["drawn"] == state["drawn"], "prompts that were drawn are not lost with a second checkpoint"
        resumed.begin(1)
        for step in range(2, STEPS + 1):
            resumed.step(step)
            assert max(ages(step, resumed.trained[step])) <= after


@pytest.mark.parametrize("changed", ["sampling", "format"])
def test_samples_of_another_distribution_or_format_are_generated_again(tmp_path: Path, changed: str) -> None:
    """Log-probabilities of another temperature are not the trainers'; older checkpoints have scores by branch."""
    setup = Setup(staleness=2, mode="exact", engines=2, steps=STEPS, filtered=False)
    first = Simulation(setup, random.Random(0))
    first.begin()
    first.step(1)
    state = first.buffer.state(tmp_path)
    assert state["sampled"]
    temperature, *others = state["sampling"]
    another = {"sampling": [temperature / 2, *others], "format": None}
    kept = Simulation(setup, random.Random(0))
    kept.load(state, tmp_path)
    assert {str(step) for step in kept.buffer._loaded} == state["sampled"].keys()
    resumed = Simulation(setup, random.Random(0))
    resumed.load({**state, changed: another[changed]}, tmp_path)
    assert not resumed.buffer._loaded
    resumed.begin(1)
    for step in range(2, STEPS + 1):
        resumed.step(step)
        assert max(ages(step, resumed.trained[step])) <= 2


def test_a_run_that_goes_on_beyond_its_end_samples_with_the_newest_weights(tmp_path: Path) -> None:
    ended = Simulation(Setup(staleness=2, mode="exact", engines=2, steps=3, filtered=False), random.Random(0))
    ended.begin()
    for step in (1, 2, 3):
        ended.step(step)
    longer = Simulation(Setup(staleness=2, mode="exact", engines=2, steps=STEPS, filtered=False), random.Random(1))
    longer.load(ended.buffer.state(tmp_path), tmp_path)
    longer.begin(3)
    for step in (4, 5, 6):
        longer.step(step)
    assert [set(ages(step, longer.trained[step])) for step in (4, 5, 6)] == [{0}, {1}, {2}]
