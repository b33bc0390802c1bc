"""Naive supervised fine-tuning and reward-model training on Hugging Face models: one sequence at a time.

- Fine-tuning: the mean over the response tokens of a step of -log softmax(logits)[token], over the whole vocabulary.
- Preferences: a response's score is the head's output at its last token; the mean over the pairs of a step of
  log(1 + exp(rejected - chosen)) + centering * (chosen + rejected)^2.
- The step is that of ``ppo``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle.adam import Adam, AdamSettings
from tests.oracle.models import Sample, token_statistics
from tests.oracle.ppo import Step

Pair = tuple[Sample, Sample]
"""The chosen and the rejected response."""


def fine_tune(
    actor: nn.Module, batches: Sequence[Sequence[Sample]], settings: AdamSettings
) -> tuple[list[Step], nn.Module]:
    """One optimizer step per batch, on a copy of the model."""

    def loss(model: nn.Module, batch: Sequence[Sample]) -> tuple[Tensor, dict[str, float]]:
        statistics = [token_statistics(model, sample, 1.0) for sample in batch]
        tokens = sum(len(sample.response_ids) for sample in batch)
        entropy = sum(own.sum().item() for _, own in statistics) / tokens
        return -torch.stack([own.sum() for own, _ in statistics]).sum() / tokens, {"entropy": entropy}

    return _train(actor, batches, loss, settings)


def train_reward(
    reward: nn.Module, batches: Sequence[Sequence[Pair]], settings: AdamSettings, *, centering: float
) -> tuple[list[Step], nn.Module]:
    """One optimizer step per batch, on a copy of the model."""

    def loss(model: nn.Module, batch: Sequence[Pair]) -> tuple[Tensor, dict[str, float]]:
        scores = [(score(model, chosen), score(model, rejected)) for chosen, rejected in batch]
        terms = [torch.log(1 + torch.exp(r - c)) + centering * (c + r) ** 2 for c, r in scores]
        numbers = [(c.item(), r.item()) for c, r in scores]
        sums = {
            "accuracy": sum(c > r for c, r in numbers),
            "margin": sum(c - r for c, r in numbers),
            "chosen": sum(c for c, _ in numbers),
            "rejected": sum(r for _, r in numbers),
        }
        return torch.stack(terms).sum() / len(batch), {name: total / len(batch) for name, total in sums.items()}

    return _train(reward, batches, loss, settings)


def score(reward: Any, sample: Sample) -> Tensor:
    """The reward head's output at the last token, a scalar."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    return reward.score(reward.base_model(input_ids=ids).last_hidden_state[0, -1])[0]


def _train(
    model: nn.Module,
    batches: Sequence[Any],
    loss_of: Callable[[nn.Module, Any], tuple[Tensor, dict[str, float]]],
    settings: AdamSettings,
) -> tuple[list[Step], nn.Module]:
    model = copy.deepcopy(model)
    adam, steps = Adam(model, settings), []
    for batch in batches:
        model.zero_grad()
        loss, metrics = loss_of(model, batch)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        steps.append(Step(loss=loss.item(), grad_norm=adam.step(), gradients=gradients, metrics=metrics))
    return steps, model
