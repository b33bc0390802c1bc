"""The supervised oracle itself, against hand numbers and Hugging Face's own loss."""

from __future__ import annotations

import math

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
    pairs = []
    for better, worse in ((0, 1), (2, 0)):
        pairs.append(supervised.Preference(responses=[SAMPLES[better], SAMPLES[worse]]))
    loss_of = supervised.pairwise(centering=0.1)
    (step,), trained = supervised.train_reward(reward, [pairs], SETTINGS, loss_of)
    losses = [-math.log(1 / (1 + math.exp(-m))) for m in (a - b, c - a)]
    assert step.loss == pytest.approx((sum(losses) + 0.1 * ((a + b) ** 2 + (c + a) ** 2)) / 2, rel=1e-5)
    assert step.metrics["margin"] == pytest.approx((c - b) / 2, rel=1e-5)
    assert step.metrics["accuracy"] == ((a > b) + (c > a)) / 2
    (again,), _ = supervised.train_reward(trained, [pairs], SETTINGS, loss_of)
    assert again.loss < step.loss
