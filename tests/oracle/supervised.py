"""Naive supervised fine-tuning and reward-model training on Hugging Face models: one sequence at a time.

- Fine-tuning: the mean over the response tokens of a step of -log softmax(logits)[token], over the whole vocabulary.
- Preferences: a response's score is the head's output at its last token; the loss is the mean over the preferences of a
  step of one of the functions below.
- Policies on preferences: one of the functions at the end, of the log-probabilities of a pair's responses, averaged
  over the pairs of a step.
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
    """Responses to a prompt, the best one first.

    Of a pair also by how much it should lead, and the log-probabilities of the responses under a reference; of a single
    response whether it is desirable.
    """

    responses: Sequence[Sample]
    margin: float = 0.0
    reference: Sequence[float] = ()
    desirable: bool = True


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


DirectLoss = Callable[[Preference, Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]
"""Of a pair and the log-probabilities of its responses' tokens: the loss, and both implicit rewards."""


def train_directly(
    actor: nn.Module, batches: Sequence[Sequence[Preference]], settings: AdamSettings, loss_of: DirectLoss
) -> tuple[list[Step], nn.Module]:
    """One optimizer step per batch, on a copy of the model."""

    def loss(model: nn.Module, batch: Sequence[Preference]) -> tuple[Tensor, dict[str, float]]:
        losses, rows = [], []
        for pair in batch:
            tokens = [token_statistics(model, sample, 1.0)[0] for sample in pair.responses]
            own, rewards = loss_of(pair, tokens)
            losses.append(own)
            rows.append([*(reward.item() for reward in rewards), *(part.sum().item() for part in tokens)])
        names = ("chosen", "rejected", "logprob_chosen", "logprob_rejected")
        metrics = {name: sum(column) / len(batch) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
        metrics["margin"] = metrics["chosen"] - metrics["rejected"]
        metrics["accuracy"] = sum(row[0] > row[1] for row in rows) / len(batch)
        return torch.stack(losses).sum() / len(batch), metrics

    return _train(actor, batches, loss, settings)


def train_on_rated(
    actor: nn.Module,
    batches: Sequence[Sequence[Preference]],
    settings: AdamSettings,
    *,
    beta: float,
    weights: tuple[float, float],
    kl: float,
) -> tuple[list[Step], nn.Module]:
    """KTO: one optimizer step per batch of single responses, on a copy of the model.

    Args:
        weights: of desirable responses and of the others.
    """

    def loss(model: nn.Module, batch: Sequence[Preference]) -> tuple[Tensor, dict[str, float]]:
        total = torch.zeros(())
        rewards, right, logprobs = [], 0, []
        for one in batch:
            whole = token_statistics(model, one.responses[0], 1.0)[0].sum()
            reward = beta * (whole - one.reference[0])
            lead = reward - beta * kl if one.desirable else beta * kl - reward
            total = total + weights[not one.desirable] * (1 - 1 / (1 + torch.exp(-lead)))
            rewards.append(reward.item())
            logprobs.append(whole.item())
            right += lead.item() > 0
        sums = {"reward": sum(rewards), "logprob": sum(logprobs), "accuracy": right, "kl": kl * len(batch)}
        metrics = {name: value / len(batch) for name, value in sums.items()}
        for name, wanted in (("desirable", True), ("undesirable", False)):
            own = [reward for reward, one in zip(rewards, batch, strict=True) if one.desirable == wanted]
            metrics[name] = sum(own) / len(own)
        return total / len(batch), metrics

    return _train(actor, batches, loss, settings)


def _against_reference(pair: Preference, tokens: Sequence[Tensor]) -> list[Tensor]:
    return [part.sum() - under for part, under in zip(tokens, pair.reference, strict=True)]


def dpo(beta: float, smoothing: float = 0.0) -> DirectLoss:
    def loss(pair: Preference, tokens: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        better, worse = (beta * ratio for ratio in _against_reference(pair, tokens))
        right = 1 / (1 + torch.exp(worse - better))
        return -(1 - smoothing) * torch.log(right) - smoothing * torch.log(1 - right), (better, worse)

    return loss


def hinge(beta: float) -> DirectLoss:
    def loss(pair: Preference, tokens: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        better, worse = (beta * ratio for ratio in _against_reference(pair, tokens))
        missing = 1 - better + worse
        return missing if missing > 0 else 0 * missing, (better, worse)

    return loss


def ipo(beta: float, *, per_token: bool) -> DirectLoss:
    def loss(pair: Preference, tokens: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        better, worse = _against_reference(pair, tokens)
        if per_token:
            better, worse = better / len(tokens[0]), worse / len(tokens[1])
        return (better - worse - 0.5 / beta) ** 2, (beta * better, beta * worse)

    return loss


def simpo(beta: float, gamma: float) -> DirectLoss:
    def loss(_: Preference, tokens: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        better, worse = (beta * part.mean() for part in tokens)
        return torch.log(1 + torch.exp(gamma + worse - better)), (better, worse)

    return loss


def orpo(beta: float) -> DirectLoss:
    def loss(_: Preference, tokens: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        chances = [torch.exp(part.mean()) for part in tokens]
        better, worse = (chance / (1 - chance) for chance in chances)
        ratio = torch.log(1 + worse / better)
        return -torch.log(chances[0]) + beta * ratio, [beta * part.mean() for part in tokens]

    return loss


def cpo(beta: float, alpha: float) -> DirectLoss:
    def loss(_: Preference, tokens: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        better, worse = (beta * part.sum() for part in tokens)
        return torch.log(1 + torch.exp(worse - better)) - alpha * tokens[0].mean(), (better, worse)

    return loss


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
