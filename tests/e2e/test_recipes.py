"""Every recipe in a short run, against the naive program in tests/oracle: losses, gradient norms, updated weights.

The runs are real: Ray, Megatron, a vLLM engine, a rule that scores. Two go on at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.e2e.recipe_cases import CASES
from tests.e2e.recipes import naive, run
from tests.e2e.runs import ROOT, lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Path]]]:
    """The directories of the runs of the recipes that are tested, as they come."""

    def finished(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        run(name, CASES[name], directory)
        return directory

    chosen = [item.callspec.params["name"] for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(finished, name) for name in chosen if name in CASES}
        pool.shutdown(cancel_futures=True)


def test_every_recipe_is_tested() -> None:
    assert set(CASES) == {file.stem for file in (ROOT / "configs/recipes").glob("*.yaml")}


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_is_what_its_source_says(name: str, runs: dict[str, Future[Path]]) -> None:
    directory, case = runs[name].result(), CASES[name]
    outcome, samples, start = naive(case, directory)
    updates = lines(directory / "run/updates.jsonl")
    for steps, loss, norm in (
        (outcome.actor_steps, "loss/total", "policy/grad_norm"),
        (outcome.critic_steps, "value/loss", "value/grad_norm"),
    ):
        told = [line for line in updates if loss in line]
        assert len(told) == len(steps), loss
        for line, step in zip(told, steps, strict=True):
            where = f"{loss}, update {line['update']}"
            assert line[loss] == pytest.approx(step.loss, rel=1e-4, abs=1e-5), where
            assert line[norm] == pytest.approx(step.grad_norm, rel=1e-4), where
    check_weights(load_file(directory / "run/export/model.safetensors"), outcome.actor, start)


def check_weights(found: dict[str, Tensor], model: nn.Module, start: dict[str, Tensor]) -> None:
    """How far the weights are off, in parts of how far they moved."""
    for name, expected in model.named_parameters():
        moved = (expected - start[name]).norm().item()
        assert (found[name] - expected).norm().item() <= 1e-3 * moved, name
