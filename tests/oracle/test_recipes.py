"""The losses, score clipping and correction weights of a recipe, against those of its source, on random numbers.

In short runs, policies and values stay too close to the old ones to reach most bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from megarl.algos.registry import DIRECT_LOSSES, POLICY_LOSSES, ROLLOUT_WEIGHTS, VALUE_LOSSES, bound
from megarl.config.schema import Algo, PreferenceTraining, Reward
from megarl.loop.scoring import reward_weights, total_scores
from tests.e2e.recipe_cases import CASES
from tests.megatron.samples import random_chunks
from tests.oracle import scores, supervised
from tests.oracle.models import Sample

PPO = [name for name, case in CASES.items() if case.select is None]
LENGTHS = (1, 4, 7, 9, 9)
FAR = (3e-4, 0.3, 2.0)
"""Standard deviations of a new log-probability around the old one: at GSPO's bounds, PPO's and the outermost ones."""


def algo_of(name: str) -> Algo:
    recipe = Path(__file__).parents[2] / f"configs/recipes/{name}.yaml"
    return Algo.model_validate(yaml.safe_load(recipe.read_text())["algo"])


def random_rows(seed: int) -> Iterator[Tensor]:
    """[B, R] matrices of standard normal numbers."""
    random = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(len(LENGTHS), max(LENGTHS), generator=random, dtype=torch.float64)


MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def same(found: Tensor, expected: list[Tensor]) -> None:
    for row, length, own in zip(found, LENGTHS, expected, strict=True):
        assert row[:length].tolist() == pytest.approx(own.tolist(), rel=1e-6, abs=1e-9)


def same_with_gradients(found: Tensor, of_found: Tensor, expected: list[Tensor], of_expected: list[Tensor]) -> None:
    """Compares losses [B, R] and their gradients with those of each row."""
    same(found.detach(), [row.detach() for row in expected])
    (gradient,) = torch.autograd.grad(found[MASK].sum(), of_found)
    same(gradient, [torch.autograd.grad(row.sum(), of)[0] for row, of in zip(expected, of_expected, strict=True)])


def split(matrix: Tensor) -> list[Tensor]:
    """The unmasked numbers of each row."""
    return [row[:length] for row, length in zip(matrix, LENGTHS, strict=True)]


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", PPO)
def test_a_recipes_policy_loss_equals_its_sources(name: str, far: float) -> None:
    choice, rows = algo_of(name).policy_loss, random_rows(1)
    old = next(rows) - 5
    new, advantages = old + far * next(rows), next(rows)
    new.requires_grad_()
    found = bound(POLICY_LOSSES, choice.name, choice.options)(new, old, advantages, MASK).values
    own = [row.detach().requires_grad_() for row in split(new)]
    policy = CASES[name].settings.policy
    expected = [policy(*numbers)[0] for numbers in zip(own, split(old), split(advantages), strict=True)]
    same_with_gradients(found, new, expected, own)


@pytest.mark.parametrize("name", [name for name in PPO if CASES[name].settings.critic is not None])
def test_a_recipes_value_loss_equals_its_sources(name: str) -> None:
    choice, rows = algo_of(name).value_loss, random_rows(2)
    old = next(rows)
    values, returns = old + 0.4 * next(rows), next(rows)
    values.requires_grad_()
    found = bound(VALUE_LOSSES, choice.name, choice.options)(values, old, returns).values
    own = [row.detach().requires_grad_() for row in split(values)]
    loss = CASES[name].settings.value
    expected = [loss(*numbers)[0] for numbers in zip(own, split(old), split(returns), strict=True)]
    same_with_gradients(found, values, expected, own)


@pytest.mark.parametrize("name", PPO)
def test_a_recipes_scores_are_shaped_as_its_source_does(name: str) -> None:
    """Except for its reward rules, which are not part of the algorithm."""
    infos = random_chunks(chunks=8)[1]
    raw = 8 * np.random.default_rng(3).normal(size=len(infos)).astype(np.float32)
    found = total_scores({"reward_model": raw}, infos, reward_weights(Reward()), algo_of(name).scores)
    shapes: list[Any] = [shape for shape in CASES[name].settings.shapes if getattr(shape, "func", 0) != scores.overlong]
    samples = [
        Sample(sample_id=info.sample_id, prompt_ids=[1], response_ids=[1], finished=info.finished, score=float(score))
        for info, score in zip(infos, raw, strict=True)
    ]
    assert found.tolist() == pytest.approx([scores.shaped(sample, shapes) for sample in samples], rel=1e-6)


@pytest.mark.parametrize("name", PPO)
def test_a_recipes_correction_weights_equal_its_sources(name: str) -> None:
    choice, weigh = algo_of(name).correction.weights, CASES[name].settings.weigh
    assert (choice is None) == (not weigh)
    if choice is None:
        return
    rows = random_rows(4)
    old = next(rows) - 5
    rollout = old + 1.5 * next(rows)
    found = bound(ROLLOUT_WEIGHTS, choice.name, choice.options)(old, rollout, MASK, lambda sums: sums)
    (of_source,) = weigh
    pairs = zip(split(old), split(rollout), strict=True)
    same(found, [torch.tensor(of_source(one.tolist(), other.tolist()), dtype=torch.float64) for one, other in pairs])


DIRECT: dict[str, Any] = {
    "dpo": supervised.dpo(0.01),
    "ipo": supervised.ipo(0.01, per_token=True),
    "simpo": supervised.simpo(2.0, 1.0),
    "orpo": supervised.orpo(0.1),
    "kto": None,
}
"""The losses of the sources of the recipes for preferences."""


@pytest.mark.parametrize("name", DIRECT)
def test_a_recipes_loss_of_preferences_equals_its_sources(name: str) -> None:
    """On log-probabilities near those of a reference, and far from them."""
    recipe = Path(__file__).parents[2] / f"configs/recipes/{name}.yaml"
    loss = PreferenceTraining.model_validate(yaml.safe_load(recipe.read_text())["preference"]).loss
    own = bound(DIRECT_LOSSES, loss.name, loss.options)
    random = torch.Generator().manual_seed(3)
    for far in (0.1, 3.0, 40.0):
        tokens = [-3 * torch.rand(length, generator=random, dtype=torch.float64) - 0.1 for length in (4, 7)]
        under = [part.sum() + far * torch.randn((), generator=random, dtype=torch.float64) for part in tokens]
        if name == "kto":
            kl = torch.tensor(0.7, dtype=torch.float64)
            for desirable in (True, False):
                terms = own(tokens[0].sum()[None], under[0][None], torch.tensor([float(desirable)]), kl)
                reward = 0.1 * (tokens[0].sum() - under[0] - kl)
                chance = 1 / (1 + torch.exp(-reward if desirable else reward))
                assert terms.values.item() == pytest.approx(1 - chance.item(), rel=1e-9)
            continue
        inputs = {
            "chosen": tokens[0].sum()[None],
            "rejected": tokens[1].sum()[None],
            "ref_chosen": under[0][None],
            "ref_rejected": under[1][None],
            "chosen_tokens": torch.tensor([4.0]),
            "rejected_tokens": torch.tensor([7.0]),
        }
        pair = supervised.Preference(responses=(), reference=[float(part) for part in under])
        expected, rewards = DIRECT[name](pair, tokens)
        terms = own(**{key: inputs[key] for key in DIRECT_LOSSES.reads(name)})
        assert terms.values.item() == pytest.approx(expected.item(), rel=1e-9)
        assert terms.metrics["margin"].item() == pytest.approx((rewards[0] - rewards[1]).item(), rel=1e-9)
