"""Losses, metrics, weights and EMA after two steps do not depend on the layout; texts in the actor's steps."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from megarl.algos import registry
from megarl.config.schema import Algo
from megarl.data.batches import on_all_tokens
from megarl.data.schedule import step_schedule
from megarl.megatron.supervised_losses import text_loss
from megarl.types import Layout
from tests.megatron.compare import weights_of
from tests.megatron.layouts import CASES, SETTINGS, TEXTS, Case, chunks, deviation, restart, samples, two_steps, updates
from tests.megatron.tiny import load_role, save_model
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


ALGO = {"policy_loss": "ppo", "entropy_coef": 0.01}


def _steps(rank: int, directory: Path, stored: Path) -> Found:
    """Two steps by the shares of the texts, and two of the texts alone; and how far apart those are that are the same.

    None takes no texts along.
    """
    columns = pickle.loads((stored / "experience").read_bytes())
    role = load_role(directory, "actor", Layout(), rank, trainable=True)
    role.start_training(SETTINGS, total_steps=2, decay=0.6)
    start = weights_of(role)
    found: Found = {}
    for name, share, same in (("none", None, "rollouts"), ("share 0", 0.0, "rollouts"), ("share 1", 1.0, "texts")):
        restart(role, start)
        steps = two_steps(role, Case(algo=ALGO, texts=share), columns, 14)
        found[name] = steps, deviation(role, start, stored / f"{same}.pt")
    restart(role, start)
    texts = on_all_tokens(samples())
    plans = [step_schedule([texts[i] for i in members], Layout(), 14) for members in TEXTS]
    steps = role.update([plan.ranks[0] for plan in plans], chunks(), partial(text_loss, role))
    found["texts"] = steps, deviation(role, start, stored / "texts.pt")
    return found


@pytest.mark.dist
def test_share_0_has_no_texts_and_share_1_only_texts(pool: RankPool, tmp_path: Path) -> None:
    directory, stored = save_model(tmp_path / "model"), tmp_path / "stored"
    pool.run(updates, directory, Layout(), 1000, stored, world_size=1)
    (found,) = pool.run(_steps, directory, stored, world_size=1)
    assert all(away < 1e-5 for _, away in found.values())
    for one, other, lost in (("share 0", "none", {"ptx_loss"}), ("share 1", "texts", set[str]())):
        for step, want in zip(found[one][0], found[other][0], strict=True):
            same = {"loss", "grad_norm"} if one == "share 1" else step.keys() - lost
            assert {name: step[name] for name in same} == pytest.approx({name: want[name] for name in same}, rel=1e-5)
    for step in found["share 1"][0]:
        assert step["loss"] == pytest.approx(step["ptx_loss"], rel=1e-6)
    none, texts = (found[name][0][0]["grad_norm"] for name in ("none", "texts"))
    assert none != pytest.approx(texts, rel=1e-3), "what is compared above to 1e-5 differs"
