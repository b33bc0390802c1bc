"""A naive PPO on Hugging Face models, for comparison: one sequence at a time, plain loops, nothing of megarl.

The choices, in the order of the computation:
- Log-probabilities and entropy are of softmax(logits / temperature) over the whole vocabulary, for actor and
  reference.
- The log-probability and the value of a response token are computed at the position before it.
- Scores are clipped to +-score_clip; a response that the length limit ended then gets missing_end_score in its place.
- Token reward: -kl_coef * KL, and the score on the last token. With d = old - ref, KL is d (k1), d^2 / 2 (k2) or
  exp(-d) - 1 + d (k3). With kl_in_loss the rewards have no such term, and the actor's loss has + kl_coef * KL with
  d = new - ref.
- With a critic, GAE per row, the value after the last token 0; returns = advantages + values, before whitening.
- Whitening: population moments of all response tokens of all samples, (A - mean) / sqrt(variance + 1e-8).
- Without a critic, every token of a sample has the advantage (score - mean) / (deviation + 1e-6), of the scores of its
  group, with n - 1 in the variance; 0 in a group of one or of equal scores.
- Losses are means over all response tokens of a mini-batch, or with sequence_mean the mean over its samples of their
  means. Actor: max(-A r, -A clamp(r, 1 - clip, 1 + clip)) - entropy_coef * H. Critic: max((V - G)^2, (clamp(V,
  V_old - value_clip, V_old + value_clip) - G)^2) / 2.
- The gradient is scaled to clip_grad where its global norm is larger: by clip_grad / (norm + 1e-6).
- Adam with decoupled weight decay, which leaves one-dimensional parameters (biases, norms) out.

Hugging Face computes norms and rotary angles in float32 whatever the dtype; the rest of a float64 model is float64.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response: its token ids, score, whether the model ended it itself, and which prompt it answers."""

    sample_id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    score: float = 0.0
    finished: bool = True
    group: int = 0


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Of one optimizer; ``clip_grad`` None does not clip."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float | None = 1.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of the algorithm; None switches a feature off."""

    actor: AdamSettings
    critic: AdamSettings | None = None
    temperature: float = 1.0
    gamma: float = 1.0
    lam: float = 0.95
    whiten_advantages: bool = True
    clip: float = 0.2
    value_clip: float | None = 0.2
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    kl_in_loss: bool = False
    sequence_mean: bool = False
    score_clip: float | None = None
    missing_end_score: float | None = None


@dataclass(kw_only=True)
class Experience:
    """Of one sample: one number per response token; without a critic the last three are empty."""

    old_logprobs: list[float]
    ref_logprobs: list[float]
    advantages: list[float]
    rewards: list[float] = field(default_factory=list)
    old_values: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step: its loss, the gradient before clipping and its norm, and means over its tokens."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of a PPO iteration; the models are trained copies of those given."""

    experience: dict[str, Experience]
    actor_steps: list[Step]
    critic_steps: list[Step]
    actor: nn.Module
    critic: nn.Module | None


def ppo_iteration(
    actor: nn.Module,
    reference: nn.Module,
    critic: nn.Module | None,
    samples: Sequence[Sample],
    mini_batches: Sequence[Sequence[str]],
    settings: Settings,
) -> Outcome:
    """One iteration of PPO on given samples.

    Args:
        actor, reference: causal language models; see ``causal_lm``.
        critic: see ``headed_model``; None compares the samples of a prompt instead.
        samples: all samples of the iteration.
        mini_batches: the sample ids of every optimizer step, in order, over all epochs.
        settings: of the algorithm.
    """
    actor, critic = copy.deepcopy(actor), copy.deepcopy(critic)
    experience = build_experience(actor, reference, critic, samples, settings)
    actor_adam, critic_adam = Adam(actor, settings.actor), critic and Adam(critic, settings.critic)
    actor_steps: list[Step] = []
    critic_steps: list[Step] = []
    by_id = {sample.sample_id: sample for sample in samples}
    for ids in mini_batches:
        members = [(by_id[sample_id], experience[sample_id]) for sample_id in ids]
        actor_steps.append(optimizer_step(actor, actor_adam, members, policy_terms, settings))
        if critic is not None:
            critic_steps.append(optimizer_step(critic, critic_adam, members, value_terms, settings))
    return Outcome(
        experience=experience, actor_steps=actor_steps, critic_steps=critic_steps, actor=actor, critic=critic
    )


# ---- models


def causal_lm(config: Mapping[str, Any], state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A language model from the fields of its HF configuration and its parameters by HF name."""
    return _model(AutoModelForCausalLM, config, state, dtype)


def headed_model(
    config: Mapping[str, Any], state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A critic or reward model: a body with a linear head, ``score.weight`` [1, hidden]."""
    return _model(AutoModelForSequenceClassification, {**config, "num_labels": 1}, state, dtype)


def _model(factory: Any, config: Mapping[str, Any], state: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    fields = {name: value for name, value in config.items() if name not in ("model_type", "architectures", "dtype")}
    settings = AutoConfig.for_model(config["model_type"], **fields)
    model, found = type(factory.from_config(settings)).from_pretrained(
        None,
        config=settings,
        state_dict={name: tensor.clone() for name, tensor in state.items()},  # the model would keep the tensors
        attn_implementation="eager",
        dtype=dtype,
        output_loading_info=True,
    )
    tied = {"lm_head.weight"} if settings.tie_word_embeddings else set()
    assert found["missing_keys"] <= tied, f"parameters without a value: {found['missing_keys']}"
    assert found["unexpected_keys"] <= tied, f"values without a parameter: {found['unexpected_keys']}"
    return model.eval()


def token_statistics(actor: nn.Module, sample: Sample, temperature: float) -> tuple[Tensor, Tensor]:
    """[R] nats: log-probability of each response token, and entropy of the distribution that it was drawn from."""
    logits = actor(input_ids=_tokens(sample)).logits[0][_source_positions(sample)]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    chosen = torch.stack([row[token] for row, token in zip(logprobs, sample.response_ids, strict=True)])
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def token_values(critic: Any, sample: Sample) -> Tensor:
    """[R]: value of the state before each response token."""
    hidden = critic.base_model(input_ids=_tokens(sample)).last_hidden_state[0]
    return critic.score(hidden[_source_positions(sample)])[:, 0]


def sequence_score(reward: Any, sample: Sample) -> float:
    """The reward head's output at the last token."""
    hidden = reward.base_model(input_ids=_tokens(sample)).last_hidden_state[0]
    return reward.score(hidden[-1]).item()


def _tokens(sample: Sample) -> Tensor:
    return torch.tensor([[*sample.prompt_ids, *sample.response_ids]])


def _source_positions(sample: Sample) -> slice:
    start = len(sample.prompt_ids) - 1
    return slice(start, start + len(sample.response_ids))


# ---- experience


@torch.no_grad()
def build_experience(
    actor: nn.Module, reference: nn.Module, critic: nn.Module | None, samples: Sequence[Sample], settings: Settings
) -> dict[str, Experience]:
    """What is computed once per iteration, by sample id."""
    experience: dict[str, Experience] = {}
    for sample in samples:
        old = token_statistics(actor, sample, settings.temperature)[0]
        ref = token_statistics(reference, sample, settings.temperature)[0]
        own = experience[sample.sample_id] = Experience(
            old_logprobs=old.tolist(),
            ref_logprobs=ref.tolist(),
            advantages=[compared(sample, samples, settings)] * len(old),
        )
        if critic is not None:
            coef = 0.0 if settings.kl_in_loss else settings.kl_coef
            own.rewards = (-coef * kl_estimate(old, ref, settings.kl_estimator)).tolist()
            own.rewards[-1] += shaped_score(sample, settings)
            own.old_values = token_values(critic, sample).tolist()
            own.advantages = gae(own.rewards, own.old_values, settings.gamma, settings.lam)
            own.returns = [a + v for a, v in zip(own.advantages, own.old_values, strict=True)]
    if critic is not None and settings.whiten_advantages:
        whiten([e.advantages for e in experience.values()])
    return experience


def shaped_score(sample: Sample, settings: Settings) -> float:
    if settings.missing_end_score is not None and not sample.finished:
        return settings.missing_end_score
    if settings.score_clip is not None:
        return min(max(sample.score, -settings.score_clip), settings.score_clip)
    return sample.score


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, name: str) -> Tensor:
    difference = logprobs - ref_logprobs
    return {"k1": difference, "k2": difference**2 / 2, "k3": torch.exp(-difference) - 1 + difference}[name]


def compared(sample: Sample, samples: Sequence[Sample], settings: Settings) -> float:
    """The advantage of a sample over the others of its group."""
    scores = [shaped_score(other, settings) for other in samples if other.group == sample.group]
    if len(set(scores)) == 1:
        return 0.0
    return (shaped_score(sample, settings) - statistics.mean(scores)) / (statistics.stdev(scores) + 1e-6)


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Advantages by the definition: A[t] = sum over k of (gamma * lam)^k * delta[t + k]."""
    after = [*values, 0.0][1:]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def whiten(rows: Sequence[list[float]]) -> None:
    """In place, over the numbers of all rows."""
    numbers = [number for row in rows for number in row]
    mean = math.fsum(numbers) / len(numbers)
    variance = math.fsum((number - mean) ** 2 for number in numbers) / len(numbers)
    for row in rows:
        row[:] = [(number - mean) / math.sqrt(variance + 1e-8) for number in row]


# ---- update


def optimizer_step(
    model: nn.Module, adam: Adam, members: Sequence[tuple[Sample, Experience]], terms: Any, settings: Settings
) -> Step:
    """The mean of a loss over a mini-batch, its gradient, and the step."""
    tokens = sum(len(sample.response_ids) for sample, _ in members)
    model.zero_grad()
    loss = 0.0
    metrics: dict[str, float] = {}
    for sample, experience in members:
        per_token, measured = terms(model, sample, experience, settings)
        share = per_token.mean() / len(members) if settings.sequence_mean else per_token.sum() / tokens
        share.backward()
        loss += share.item()
        for name, values in measured.items():
            metrics[name] = metrics.get(name, 0.0) + values.double().sum().item() / tokens
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss=loss, grad_norm=adam.step(), gradients=gradients, metrics=metrics)


def policy_terms(
    actor: nn.Module, sample: Sample, experience: Experience, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """[R]: the actor's loss per token, and what it measures."""
    new, entropy = token_statistics(actor, sample, settings.temperature)
    old, advantages = new.new_tensor(experience.old_logprobs), new.new_tensor(experience.advantages)
    ratio = torch.exp(new - old)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - settings.clip, 1 + settings.clip)
    loss = torch.where(clipped > unclipped, clipped, unclipped) - settings.entropy_coef * entropy
    penalty: dict[str, Tensor] = {}
    if settings.kl_in_loss:
        kl = kl_estimate(new, new.new_tensor(experience.ref_logprobs), settings.kl_estimator)
        loss = loss + settings.kl_coef * kl
        penalty["kl"] = kl.detach()
    return loss, {
        **penalty,
        "ratio": ratio.detach(),
        "clipfrac": (clipped > unclipped).float(),
        "approxkl": (new - old).detach() ** 2 / 2,
        "ppo_kl": (old - new).detach(),
        "entropy": entropy.detach(),
    }


def value_terms(
    critic: nn.Module, sample: Sample, experience: Experience, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """[R]: the critic's loss per token, and what it measures."""
    values = token_values(critic, sample)
    old, returns = values.new_tensor(experience.old_values), values.new_tensor(experience.returns)
    error = (values - returns) ** 2
    loss = error
    if settings.value_clip is not None:
        near = old + (values - old).clamp(-settings.value_clip, settings.value_clip)
        loss = torch.where((near - returns) ** 2 > error, (near - returns) ** 2, error)
    return loss / 2, {
        "vpred": values.detach(),
        "error": error.detach(),
        "clipfrac": (loss > error).float(),
    }


@dataclass
class Adam:
    """AdamW by its formula, after clipping."""

    model: nn.Module
    settings: AdamSettings
    steps: int = 0
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def step(self) -> float:
        """Moves the parameters; returns the norm of the whole gradient before clipping."""
        s = self.settings
        parameters = {name: p for name, p in self.model.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in parameters.values()))
        scale = 1.0 if s.clip_grad is None else min(1.0, s.clip_grad / (norm + 1e-6))
        self.steps += 1
        for name, p in parameters.items():
            gradient = p.grad * scale
            first, second = self.moments.get(name, (torch.zeros_like(p), torch.zeros_like(p)))
            first = s.betas[0] * first + (1 - s.betas[0]) * gradient
            second = s.betas[1] * second + (1 - s.betas[1]) * gradient**2
            self.moments[name] = first, second
            first_hat = first / (1 - s.betas[0] ** self.steps)
            second_hat = second / (1 - s.betas[1] ** self.steps)
            if p.ndim > 1:
                p -= s.lr * s.weight_decay * p
            p -= s.lr * first_hat / (second_hat.sqrt() + s.eps)
        return norm
