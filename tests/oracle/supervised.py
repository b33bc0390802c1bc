"""Naive supervised fine-tuning and reward-model training on Hugging Face models: one sequence at a time.

- Fine-tuning: the mean over the response tokens of a step of -log softmax(logits)[token], over the whole vocabulary.
- Preferences: a response's score is the head's output at its last token; the loss is the mean over the preferences of a
  step of one of the functions below.
- The step is that of ``ppo``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle.adam import Adam, AdamSettings
from tests.oracle.models import Sample, token_statistics
from tests.oracle.ppo import Step


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Responses to a prompt, the best one first; of a pair, by how much it should lead."""

    responses: Sequence[Sample]
    margin: float = 0.0


PreferenceLoss = Callable[[nn.Module, Preference], Tensor]


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
    reward: nn.Module,
    batches: Sequence[Sequence[Preference]],
    settings: AdamSettings,
    loss_of: PreferenceLoss,
) -> tuple[list[Step], nn.Module]:
    """One optimizer step per batch, on a copy of the model."""

    def loss(model: nn.Module, batch: Sequence[Preference]) -> tuple[Tensor, dict[str, float]]:
        scores = [[score(model, sample).item() for sample in one.responses] for one in batch]
        metrics = {"accuracy": sum(best > max(others) for best, *others in scores) / len(batch)}
        every = [value for one in scores for value in one]
        metrics["score_mean"] = sum(every) / len(every)
        metrics["score_var"] = sum((value - metrics["score_mean"]) ** 2 for value in every) / len(every)
        if all(len(one) == 2 for one in scores):
            metrics["chosen"] = sum(best for best, _ in scores) / len(batch)
            metrics["rejected"] = sum(other for _, other in scores) / len(batch)
            metrics["margin"] = metrics["chosen"] - metrics["rejected"]
        return torch.stack([loss_of(model, one) for one in batch]).sum() / len(batch), metrics

    return _train(reward, batches, loss, settings)


def pairwise(*, centering: float = 0.0) -> PreferenceLoss:
    """log(1 + exp(rejected + margin - chosen)) + centering * (chosen + rejected)^2."""

    def loss(model: nn.Module, pair: Preference) -> Tensor:
        chosen, rejected = (score(model, sample) for sample in pair.responses)
        return torch.log(1 + torch.exp(rejected + pair.margin - chosen)) + centering * (chosen + rejected) ** 2

    return loss


def best_of_n(model: nn.Module, one: Preference) -> Tensor:
    """-log of the best one's part in the sum of exp(score)."""
    scores = [torch.exp(score(model, sample)) for sample in one.responses]
    return -torch.log(scores[0] / torch.stack(scores).sum())


def span(model: nn.Module, pair: Preference) -> Tensor:
    """The mean of log(1 + exp(rejected - chosen)) after every token, from the first in which the responses differ.

    A response that has ended keeps its last score.
    """
    chosen, rejected = pair.responses
    ends = len(chosen.response_ids), len(rejected.response_ids)
    terms = []
    for t in range(max(ends)):
        if list(chosen.response_ids[: t + 1]) == list(rejected.response_ids[: t + 1]):
            continue
        after = [score(model, replace(sample, response_ids=sample.response_ids[: t + 1])) for sample in pair.responses]
        terms.append(torch.log(1 + torch.exp(after[1] - after[0])))
    return torch.stack(terms).mean()


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
