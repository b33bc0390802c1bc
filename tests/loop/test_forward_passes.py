"""Forward passes over parts of a step overlap with generation; their results do not depend on timing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.loop.forward_passes import ForwardPasses
from tests.loop.simulation import PROMPTS_PER_STEP, Setup, Simulation, content, resumed, saved, trained
from tests.loop.simulation import run as run_setup
from tests.unit_profile import fewer

STEPS, SCHEDULES = 5, fewer(40)

PLAIN: Mapping[str, bool] = {"filtered": False}
KINDS: Sequence[Any] = [
    pytest.param(PLAIN, id="plain"),
    pytest.param({"filtered": True}, id="filtered"),
    pytest.param({"filtered": False, "greedy": True}, id="greedy"),
    pytest.param({"filtered": False, "curriculum": True}, id="curriculum"),
    pytest.param({"filtered": True, "curriculum": True}, id="filtered curriculum"),
]


pytestmark = pytest.mark.usefixtures("references_are_values")


def setup(seed: int, kind: Mapping[str, bool], **options: Any) -> Setup:
    return Setup(mode="exact", engines=1 + seed % 3, steps=STEPS, **{**kind, **options})


def run(seed: int, kind: Mapping[str, bool], **options: Any) -> Simulation:
    return run_setup(setup(seed, kind, **options), seed)


def numbers(simulation: Simulation) -> list[Any]:
    """The samples and scores of every step, and what depends on the packing: columns, and scores of a model."""
    return [
        (
            content(sampled),
            sampled.scoring.result().scores["rule"].tolist(),
            None if sampled.greedy is None else sampled.greedy.result().scores["rule"].tolist(),
            simulation.columns[step],
            sampled.scoring.result().scores["packed"].tolist(),
            sampled.metrics,
        )
        for step, sampled in sorted(simulation.trained.items())
    ]


def calls(simulation: Simulation) -> dict[str, int]:
    return {name: len(role.begun) for name, role in simulation.roles.items()}


def beside(simulation: Simulation) -> dict[str, int]:
    """The number of calls of each role that began while engines generated."""
    return {name: sum(role.begun) for name, role in simulation.roles.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_numbers_do_not_depend_on_the_order_of_arrival(staleness: int, parts: int, kind: Mapping[str, bool]) -> None:
    runs = [run(seed, kind, staleness=staleness, parts=parts) for seed in range(SCHEDULES)]
    for seed, simulation in enumerate(runs):
        assert numbers(simulation) == numbers(runs[0]), f"schedule {seed} differs"
    for step, samples in enumerate(trained(runs[0]), start=1):
        assert {version for _, _, versions in samples for version in versions} == {max(0, step - 1 - staleness)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("staleness", [0, 2])
def test_parts_change_only_the_packing(staleness: int, kind: Mapping[str, bool]) -> None:
    """A step that is one part has the numbers of engines on the trainers' devices, where nothing begins early."""
    shared, whole, parts = (
        run(1, kind, staleness=staleness, parts=parts, shared=shared)
        for parts, shared in ((1, True), (1, False), (3, False))
    )
    assert numbers(shared) == numbers(whole)
    assert [each[:3] for each in numbers(parts)] == [each[:3] for each in numbers(whole)]
    same = kind["filtered"]
    assert ([each[3] for each in numbers(parts)] == [each[3] for each in numbers(whole)]) is same


def test_every_role_starts_on_parts_of_a_step_sampled_just_before_training() -> None:
    runs = [run(seed, PLAIN, staleness=0, parts=3) for seed in range(SCHEDULES)]
    for simulation in runs:
        assert calls(simulation) == dict.fromkeys(("actor", "critic", "reference"), 3 * STEPS)
        assert len(set(beside(simulation).values())) == 1
        assert 0 < beside(simulation)["actor"] <= 2 * STEPS, "the last part begins with the last response"


def test_only_the_reference_runs_ahead_of_the_actor() -> None:
    for seed in range(SCHEDULES):
        simulation = run(seed, PLAIN, staleness=2, parts=3)
        assert calls(simulation) == {"actor": STEPS, "critic": STEPS, "reference": 3 * STEPS}
        assert beside(simulation)["reference"] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("staleness", "parts"), [(0, 3), (1, 1), (1, 3), (3, 3)])
def test_a_run_resumed_from_any_checkpoint_has_the_numbers_of_one_that_was_not_interrupted(
    tmp_path: Path, staleness: int, parts: int, kind: Mapping[str, bool]
) -> None:
    options = {"staleness": staleness, "parts": parts}
    straight = numbers(run(0, kind, **options))
    for seed in range(SCHEDULES // 2):
        step, directory = 1 + seed % (STEPS - 1), tmp_path / str(seed)
        _, state = saved(setup(seed, kind, **options), seed, step, directory)
        assert bool(state.get("sampled")) == directory.exists()
        state = json.loads(json.dumps(state))
        again = resumed(setup(seed + 1000, kind, **options), seed + 1000, step, state, directory)
        assert numbers(again) == straight[step:], f"schedule {seed} differs after step {step}"


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_curriculum_knows_every_draw_and_lets_prompts_wait(staleness: int, *, filtered: bool) -> None:
    """Those that the filter rejects have scores, too."""
    simulation = run(0, {"curriculum": True, "filtered": filtered}, staleness=staleness)
    state = simulation.buffer.state(Path("unused"))["curriculum"]
    draws = sum(step > 0 for steps in state["steps"] for step in steps)
    expected = PROMPTS_PER_STEP * STEPS
    if filtered:
        expected = sum(int(sampled.metrics["filter/groups"]) for sampled in simulation.trained.values())
        assert expected > PROMPTS_PER_STEP * STEPS, "nothing was rejected"
    assert draws == expected
    unknown = [sampled.metrics["curriculum/unknown"] for _, sampled in sorted(simulation.trained.items())]
    assert unknown[: staleness + 1] == [1.0] * (staleness + 1)
    assert all(after < before for before, after in pairwise(unknown[staleness : staleness + 3]))
    drawn = [{prompt.prompt_id for prompt in sampled.prompts} for _, sampled in sorted(simulation.trained.items())]
    if not filtered:
        assert all(before.isdisjoint(after) for before, after in pairwise(drawn)), "of 11 prompts, 3 are drawn"


def test_an_engine_that_dies_changes_no_number() -> None:
    runs = [run(seed, PLAIN, staleness=0, parts=3, losses=2) for seed in range(SCHEDULES)]
    assert sum(len(simulation.engines.replaced) for simulation in runs) > STEPS
    assert all(numbers(simulation) == numbers(runs[0]) for simulation in runs)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ["logprobs", "ref", "values"]),
        ({"has_logprob_pass": False}, ["ref", "values"]),
        ({"staleness": 1}, ["ref"]),
        ({"staleness": 1, "together": True}, []),
        ({"staleness": 1, "moves": True}, []),
        ({"moves": True, "together": True}, ["logprobs", "ref", "values"]),
    ],
)
def test_roles_whose_passes_need_not_wait_for_training(settings: Mapping[str, Any], names: Sequence[str]) -> None:
    config: Any = SimpleNamespace(
        algo=SimpleNamespace(
            filter=None,
            kl=SimpleNamespace(reference_sync=object() if settings.get("moves") else None),
            has_logprob_pass=settings.get("has_logprob_pass", True),
        ),
        rollout=SimpleNamespace(max_staleness=settings.get("staleness", 0), inference_parts=2),
    )
    train, own = object(), object()
    roles: Any = {
        "actor": SimpleNamespace(name="actor", group=train),
        "reference": SimpleNamespace(name="reference", group=train if settings.get("together") else own),
        "critic": SimpleNamespace(name="critic", group=own),
    }
    passes = ForwardPasses(config, config.algo, roles)
    passes._call = lambda name, rollouts: name  # pyright: ignore
    part: Any = object()
    assert list(passes.begin(part)) == names
