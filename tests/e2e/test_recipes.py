"""Every recipe in a short run, against the naive program in tests/oracle: losses, gradient norms, updated weights.

The runs are real: Ray, Megatron, a vLLM engine, a rule that scores. Two run at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import Tensor

from tests.e2e.recipe_cases import CASES, IN_MATRIX, RUNS
from tests.e2e.recipes import Case, Expected, naive, prepare, running
from tests.e2e.runs import ROOT, lines
from tests.megatron.tiny import peft_state
from tests.oracle import selection
from tests.oracle.models import Sample
from tests.oracle.test_recipes import DIRECT

pytestmark = [pytest.mark.e2e]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Path]]]:
    """The run directories of the tested recipes, as futures."""
    here: list[Any] = [item for item in request.session.items if item.path == request.path]
    chosen = list(dict.fromkeys(item.callspec.params["name"] for item in here if "runs" in item.fixturenames))
    directories = {name: tmp_path_factory.mktemp(name) for name in chosen}
    for name, directory in directories.items():
        prepare(name, RUNS[name], directory)
    halves = chosen[::2], chosen[1::2]
    with ExitStack() as stack:
        started = [stack.enter_context(running([directories[name] for name in half])) for half in halves]
        yield {
            name: run for half, runs in zip(halves, started, strict=True) for name, run in zip(half, runs, strict=True)
        }


def test_every_recipe_is_tested() -> None:
    """Those of preferences by tests/oracle/test_recipes.py."""
    recipes = {file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / "configs/recipes").glob("*.yaml")}
    assert set(CASES) == {name for name, recipe in recipes.items() if recipe["stage"] == "ppo"}
    assert set(DIRECT) == {name for name, recipe in recipes.items() if recipe["stage"] == "dpo"}


FILTERS = {
    selection.deviating: "nonzero_std",
    selection.between: {"name": "open_range", "low": 0.0, "high": 1.0},
}
"""By their functions in the oracle."""


@pytest.mark.parametrize("name", CASES)
def test_options_replaced_in_short_runs_equal_the_sources(name: str) -> None:
    """Adam's epsilon, which every short run replaces, and options that tests/megatron/test_oracle.py does not use."""
    recipe, case = yaml.safe_load((ROOT / f"configs/recipes/{name}.yaml").read_text()), CASES[name]
    assert recipe["actor"]["optimizer"].get("eps", 1e-8) == case.settings.actor.eps
    assert recipe["actor"].get("ema") == ({"decay": case.settings.average_decay} if case.average else None)
    assert ("critic" in recipe) == (case.critic is not None)
    if case.settings.critic is not None:
        assert recipe["critic"]["optimizer"].get("eps", 1e-8) == case.settings.critic.eps
        assert recipe["critic"].get("head", "new") == case.critic
    assert ("ptx" in recipe) == case.mixes
    if case.mixes:
        mixed = {name: recipe["ptx"][name] for name in ("mode", "coef", "loss_on")}
        assert mixed == {"mode": case.settings.mixing, "coef": case.settings.mixing_coef, "loss_on": "all"}
    if case.select is None:
        assert recipe["rollout"]["temperature"] == case.settings.temperature
        assert recipe["algo"].get("filter") == FILTERS.get(case.keeps)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.matrix if name in IN_MATRIX or name not in CASES else ()) for name in RUNS],
)
def test_a_short_run_of_a_recipe_equals_the_naive_program(name: str, runs: dict[str, Future[Path]]) -> None:
    directory, case = runs[name].result() / "run", RUNS[name]
    expected = naive(case, directory.parent)
    updates = lines(directory / "updates.jsonl")
    for steps, loss, norm in (
        (expected.actor_steps, "loss/total", "policy/grad_norm"),
        (expected.critic_steps, "value/loss", "value/grad_norm"),
    ):
        told = [line for line in updates if loss in line]
        assert len(told) == len(steps), loss
        for line, step in zip(told, steps, strict=True):
            where = f"{loss}, update {line['update']}"
            # Terms of a loss cancel, and float32 keeps seven digits; later steps start from slightly different weights.
            assert line[loss] == pytest.approx(step.loss, rel=1e-4, abs=1e-5), where
            assert line[norm] == pytest.approx(step.grad_norm, rel=1e-4), where
    found = load_file(directory / "export/model.safetensors")
    wanted = dict(expected.actor.named_parameters())
    if case.adapters:
        found = peft_state(directory / "export-adapter")
        wanted = {name.replace("|", "."): value for name, value in wanted.items() if value.requires_grad}
    check_weights(found, wanted, expected)
    assert (directory / "export-ema").exists() == case.average
    if case.average:
        # It has moved by a hundredth of the way, which float32 beside the weights knows to three digits.
        check_weights(load_file(directory / "export-ema/model.safetensors"), expected.average, expected, part=5e-3)
    if case.select is not None:
        check_selection(directory, case, expected)
    if case.divisor == 2:
        assert expected.left_out > 0, "the filter had nothing to do"


@pytest.mark.parametrize("name", ["grpo"])
def test_no_pass_is_made_before_the_only_optimizer_step(name: str, runs: dict[str, Future[Path]]) -> None:
    """tests/megatron/test_one_optimizer_step.py has the numbers with the pass."""
    metrics = lines(runs[name].result() / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert not any(metric.endswith("/logprobs") for metric in line), "of the pass"
        assert line["policy/ratio_min"] == line["policy/ratio_max"] == 1
        assert 0 < line["rollout/logprob_gap"] < 1e-5


def check_selection(directory: Path, case: Case, expected: Expected) -> None:
    """The metrics of a run's demonstrations, which are selected responses."""
    assert any(not sample.finished for own in expected.answered for sample in own), "none was to be discarded"
    metrics = lines(directory / "metrics.jsonl")
    for line, answered, selected in zip(metrics, expected.answered, expected.selected, strict=True):
        assert line["select/samples"] == len(selected)
        assert line["select/score"] == pytest.approx(mean(selected))
        assert line["objective/score"] == pytest.approx(mean(answered)), "of all responses, not of the best"
    adam = case.settings.actor
    for line, step in zip(lines(directory / "updates.jsonl"), expected.actor_steps, strict=True):
        assert line["policy/entropy"] == pytest.approx(step.metrics["entropy"], rel=1e-4)
        assert line["policy/lr"] == pytest.approx(adam.lr * adam.schedule(line["update"] - 1))


def mean(samples: Sequence[Sample]) -> float:
    return fmean(sample.score for sample in samples if sample.score is not None)


def check_weights(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], run: Expected, *, part: float = 1e-3
) -> None:
    """The deviation of the weights relative to their update."""
    for name, weight in expected.items():
        moved = (weight - run.start[name]).norm().item()
        assert moved > 0, name
        assert (found[name] - weight).norm().item() <= part * moved, name
