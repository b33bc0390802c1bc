"""Every dense family against Hugging Face and the naive training steps, in layouts that do not divide it evenly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.types import Layout
from tests.megatron.compare import state_of
from tests.megatron.families import FAMILIES
from tests.megatron.supervised import (
    Naive,
    check_steps,
    fine_tuned,
    headed_state,
    preferences,
    rewarded,
    sft,
    two_steps,
)
from tests.megatron.test_parity import expectations, infer, layout_id, worst_differences
from tests.pool import RankPool

pytestmark = pytest.mark.dist

Expected = dict[str, dict[tuple[int, int], Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: family.save(tmp_path_factory.mktemp(name)) for name, family in FAMILIES.items()}


def _layouts(*wanted: Layout, names: Iterable[str] = FAMILIES) -> list[Any]:
    """Families in some layouts; where they have TP, in the first of its own that the pool has ranks for."""
    cases = []
    for name, layout in itertools.product(names, wanted):
        own = (replace(layout, tp=tp) for tp in (FAMILIES[name].tp if layout.tp > 1 else (1,)))
        fitting = next((layout for layout in own if layout.world_size <= 4), None)
        if fitting is not None:
            cases.append(pytest.param(name, fitting, id=f"{name}-{layout_id(fitting)}"))
    return cases


TP, SP = Layout(tp=2), Layout(tp=2, sequence_parallel=True)
INTERLEAVED = Layout(pp=2, vpp=2)


@pytest.mark.parametrize(("family", "layout"), _layouts(Layout(), SP, INTERLEAVED))
def test_a_family_equals_hugging_face(pool: RankPool, models: dict[str, Path], family: str, layout: Layout) -> None:
    results = pool.run(infer, models[family], layout, 40, world_size=layout.world_size)
    expected = expectations(models[family])
    for what, worst in worst_differences(results, expected).items():
        largest = max(want.abs().max().item() for want in expected[what].values())
        # Over TP, float32 sums are taken in another order: the error grows with the numbers that are summed.
        bar = 1e-5 if layout.tp == 1 else 1e-5 * max(1.0, largest)
        assert worst <= bar, f"{what} differ from Hugging Face by {worst:.2e}, more than {bar:.2e}"


@pytest.fixture(scope="module")
def demonstrated(models: dict[str, Path]) -> dict[str, Naive]:
    return {name: fine_tuned(directory) for name, directory in models.items()}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *_layouts(replace(SP, pp=2, vpp=2), Layout(pp=4)),
        *_layouts(TP, SP, INTERLEAVED, replace(SP, pp=2), names=["llama"]),
        *_layouts(SP, names=["qwen2"]),  # TP 3 alone
    ],
)
def test_fine_tuning_a_family_equals_the_naive_one(
    pool: RankPool, models: dict[str, Path], demonstrated: dict[str, Naive], family: str, layout: Layout
) -> None:
    results = pool.run(two_steps, models[family], "actor", layout, 40, sft, world_size=layout.world_size)
    check_steps(results, demonstrated[family], state_of(models[family]))


@pytest.mark.parametrize(("family", "layout"), _layouts(SP))
def test_a_reward_model_of_a_family_equals_the_naive_one(
    pool: RankPool, models: dict[str, Path], family: str, layout: Layout
) -> None:
    results = pool.run(two_steps, models[family], "reward", layout, 40, preferences, world_size=layout.world_size)
    check_steps(results, rewarded(models[family]), headed_state(models[family]))
