"""Every recipe in a short run, against the naive program in tests/oracle: losses, gradient norms, updated weights.

The runs are real: Ray, Megatron, a vLLM engine, a rule that scores. Two go on at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import Tensor

from tests.e2e.recipe_cases import CASES, IN_MATRIX
from tests.e2e.recipes import Expected, naive, prepare, running
from tests.e2e.runs import ROOT, lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Path]]]:
    """The directories of the runs of the recipes that are tested, as they come."""
    here: list[Any] = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params["name"] for item in here if "runs" in item.fixturenames]
    directories = {name: tmp_path_factory.mktemp(name) for name in chosen}
    for name, directory in directories.items():
        prepare(name, CASES[name], directory)
    halves = chosen[::2], chosen[1::2]
    with ExitStack() as stack:
        started = [stack.enter_context(running([directories[name] for name in half])) for half in halves]
        yield {
            name: run for half, runs in zip(halves, started, strict=True) for name, run in zip(half, runs, strict=True)
        }


def test_every_recipe_is_tested() -> None:
    assert set(CASES) == {file.stem for file in (ROOT / "configs/recipes").glob("*.yaml")}


@pytest.mark.parametrize("name", CASES)
def test_adams_epsilon_is_that_of_the_source(name: str) -> None:
    recipe = yaml.safe_load((ROOT / f"configs/recipes/{name}.yaml").read_text())
    assert recipe["actor"]["optimizer"].get("eps", 1e-8) == CASES[name].settings.actor.eps
    if CASES[name].settings.critic is not None:
        assert recipe["critic"]["optimizer"].get("eps", 1e-8) == CASES[name].settings.critic.eps


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if name in IN_MATRIX else ()) for name in CASES]
)
def test_a_recipe_is_what_its_source_says(name: str, runs: dict[str, Future[Path]]) -> None:
    directory, case = runs[name].result() / "run", CASES[name]
    expected = naive(case, directory.parent)
    updates = lines(directory / "updates.jsonl")
    of_actor = ("raft/loss", "raft/grad_norm") if case.best else ("loss/total", "policy/grad_norm")
    for steps, loss, norm in (
        (expected.actor_steps, *of_actor),
        (expected.critic_steps, "value/loss", "value/grad_norm"),
    ):
        told = [line for line in updates if loss in line]
        assert len(told) == len(steps), loss
        for line, step in zip(told, steps, strict=True):
            where = f"{loss}, update {line['update']}"
            # Terms of a loss cancel, of which float32 keeps seven digits; later steps are of weights that differ a bit.
            assert line[loss] == pytest.approx(step.loss, rel=1e-4, abs=1e-5), where
            assert line[norm] == pytest.approx(step.grad_norm, rel=1e-4), where
    check_weights(load_file(directory / "export/model.safetensors"), dict(expected.actor.named_parameters()), expected)
    assert (directory / "export-ema").exists() == case.average
    if case.average:
        # It has moved by a hundredth of the way, which float32 beside the weights knows to three digits.
        check_weights(load_file(directory / "export-ema/model.safetensors"), expected.average, expected, part=5e-3)
    if CASES[name].divisor == 2:
        assert expected.left_out > 0, "the filter had nothing to do"


def check_weights(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], run: Expected, *, part: float = 1e-3
) -> None:
    """How far the weights are off, in parts of how far they moved."""
    for name, weight in expected.items():
        moved = (weight - run.start[name]).norm().item()
        assert moved > 0, name
        assert (found[name] - weight).norm().item() <= part * moved, name
