"""The supervised oracle itself, against hand numbers and Hugging Face's own loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.oracle import supervised
from tests.oracle.adam import AdamSettings
from tests.oracle.models import sequence_score
from tests.oracle.test_ppo import SAMPLES, language_model, value_model

SETTINGS = AdamSettings(lr=1e-2)


def test_the_loss_of_one_demonstration_equals_hugging_faces() -> None:
    actor, sample = language_model(0), SAMPLES[0]
    (step,), tuned = supervised.fine_tune(actor, [[sample]], SETTINGS)
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    labels = torch.tensor([[-100] * len(sample.prompt_ids) + list(sample.response_ids)])
    loss = actor(input_ids=ids, labels=labels).loss
    assert step.loss == pytest.approx(loss.item(), rel=1e-6)
    loss.backward()
    torch.testing.assert_close(step.gradients["lm_head.weight"], actor.lm_head.weight.grad)
    assert tuned(input_ids=ids, labels=labels).loss.item() < step.loss


def test_preferences_by_hand() -> None:
    reward = value_model(1)
    a, b, c = (sequence_score(reward, sample) for sample in SAMPLES)
    pairs = [pair(0, 1), pair(2, 0)]
    loss_of = supervised.pairwise(centering=0.1)
    (step,), trained = supervised.train_reward(reward, [pairs], SETTINGS, loss_of)
    losses = [-math.log(1 / (1 + math.exp(-m))) for m in (a - b, c - a)]
    assert step.loss == pytest.approx((sum(losses) + 0.1 * ((a + b) ** 2 + (c + a) ** 2)) / 2, rel=1e-5)
    assert step.metrics["margin"] == pytest.approx((c - b) / 2, rel=1e-5)
    assert step.metrics["accuracy"] == ((a > b) + (c > a)) / 2
    (again,), _ = supervised.train_reward(trained, [pairs], SETTINGS, loss_of)
    assert again.loss < step.loss


def test_a_margin_is_subtracted_from_the_difference() -> None:
    reward = value_model(1)
    a, b, _ = (sequence_score(reward, sample) for sample in SAMPLES)
    (step,), _ = supervised.train_reward(reward, [[pair(0, 1, margin=0.7)]], SETTINGS, supervised.pairwise())
    assert step.loss == pytest.approx(-math.log(1 / (1 + math.exp(-(a - b - 0.7)))), rel=1e-5)


def test_best_of_two_equals_pairwise_and_equal_scores_cost_log_n() -> None:
    reward = value_model(1)
    two, pairs = ([[pair(0, 1)]] for _ in range(2))
    (best,), _ = supervised.train_reward(reward, two, SETTINGS, supervised.best_of_n)
    (chosen,), _ = supervised.train_reward(reward, pairs, SETTINGS, supervised.pairwise())
    assert best.loss == pytest.approx(chosen.loss, rel=1e-5)
    (flat,), _ = supervised.train_reward(reward, [[pair(0, 0, 0)]], SETTINGS, supervised.best_of_n)
    assert flat.loss == pytest.approx(math.log(3), rel=1e-5)
    assert flat.metrics["accuracy"] == 0


def test_span_loss_of_one_token_equals_pairwise() -> None:
    reward, sample = value_model(1), SAMPLES[0]
    ends = [replace(sample, response_ids=[*sample.response_ids, token]) for token in (1, 2)]
    one = supervised.Preference(responses=ends)
    (spanned,), _ = supervised.train_reward(reward, [[one]], SETTINGS, supervised.span)
    (chosen,), _ = supervised.train_reward(reward, [[one]], SETTINGS, supervised.pairwise())
    assert spanned.loss == pytest.approx(chosen.loss, rel=1e-5)


def pair(*samples: int, margin: float = 0.0) -> supervised.Preference:
    return supervised.Preference(responses=[SAMPLES[index] for index in samples], margin=margin)
