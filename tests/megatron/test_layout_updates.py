"""Losses, metrics, and weights and EMA after two steps do not depend on the layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megarl.algos import registry
from megarl.config.schema import Algo
from megarl.types import Layout
from tests.megatron.layouts import CASES, updates
from tests.megatron.tiny import save_model
from tests.pool import RankPool

LAYOUTS = {
    "one rank, small micro-batches": (Layout(), 14),
    "DP4": (Layout(dp=4), 14),
    "TP2 x PP2": (Layout(tp=2, pp=2), 20),
    "TP2 x DP2 with SP": (Layout(tp=2, dp=2, sequence_parallel=True), 14),
    "PP2 interleaved x DP2": (Layout(pp=2, vpp=2, dp=2), 20),
    "PP4": (Layout(pp=4), 100),
}

Found = Mapping[str, tuple[list[dict[str, float]], float]]


@pytest.fixture(scope="module")
def alone(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Found]:
    """A model, and what a single rank with one micro-batch has stored and reported."""
    directory = save_model(tmp_path_factory.mktemp("model"))
    stored = tmp_path_factory.mktemp("alone") / "stored"
    (found,) = pool.run(updates, directory, Layout(), 1000, stored, world_size=1)
    return directory, stored, found


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "budget"), LAYOUTS.values(), ids=LAYOUTS)
def test_losses_do_not_depend_on_the_layout(
    pool: RankPool, alone: tuple[Path, Path, Found], layout: Layout, budget: int
) -> None:
    directory, stored, expected = alone
    results = pool.run(updates, directory, layout, budget, stored, world_size=layout.world_size)
    for name in CASES:
        wanted, _ = expected[name]
        told = [result[name][0] for result in results if result[name][0]]
        assert len(told) == layout.dp
        for steps in told:
            for step, want in zip(steps, wanted, strict=True):
                # Losses of advantages of either sign cancel: what is left has the rounding of the terms.
                assert step == pytest.approx(want, rel=1e-5, abs=1e-6), name
        assert max(result[name][1] for result in results) < 1e-5, name


def test_the_cases_cover_every_registered_function() -> None:
    algos = {name: Algo.model_validate(case.algo) for name, case in CASES.items()}
    policies = [algo for name, algo in algos.items() if not CASES[name].critic]
    used = {
        "POLICY_LOSSES": {algo.policy_loss.name for algo in policies},
        "VALUE_LOSSES": {algo.value_loss.name for algo in algos.values()},
        "AGGREGATIONS": {algo.aggregation.name for algo in policies},
        "KL_ESTIMATORS": {algo.kl.estimator.name for algo in policies if algo.kl.placement == "loss"},
        "ROLLOUT_WEIGHTS": {algo.correction.weights.name for algo in policies if algo.correction.weights},
    }
    for table, names in used.items():
        registered = {name for name in names if ":" not in name}
        assert registered == set(getattr(registry, table).functions), table


@pytest.mark.dist
def test_custom_losses_report_the_metrics_that_a_run_reads(alone: tuple[Path, Path, Found]) -> None:
    _, _, found = alone
    for step in found["own policy loss"][0]:
        assert {"ppo_kl", "entropy", "policy_loss"} <= step.keys()
    for step, other in zip(found["own value loss"][0], found["mse"][0], strict=True):
        assert {"error", "returns_var"} <= step.keys() <= other.keys()
