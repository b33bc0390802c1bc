"""A job of the rank pool: two optimizer steps of every loss in one layout, compared with those of a single rank.

The samples are ragged; some have no response token, some have tokens that are weighted 0 throughout, and the second
step is so small that ranks have no token, or no row.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.algos.policy_loss import LossTerms
from megarl.config.schema import Algo, Optimizer
from megarl.config.schema.loss_specs import PolicySpec
from megarl.data.batches import on_all_tokens
from megarl.data.schedule import inference_schedule, step_schedule, under_one_length
from megarl.experience.records import ExperienceChunk
from megarl.megatron.losses import PolicyLoss, value_loss
from megarl.megatron.optimizer import shards
from megarl.megatron.parallel import GroupCache
from megarl.megatron.supervised_losses import text_loss
from megarl.megatron.worker_requests import UpdateRequest
from megarl.types import Layout, Ragged, SampleInfo, TextChunk
from tests.megatron.compare import logprobs_by_chunk, shards_of, weights_of
from tests.megatron.tiny import load_role, random_head

LENGTHS = [(3, 9), (5, 1), (2, 0), (7, 4), (1, 6), (4, 0), (2, 2), (6, 8), (3, 5), (1, 1), (5, 3), (2, 7)]
"""Prompt and response tokens of each sample; three make a chunk."""
STEPS = [[0, 1, 2, 3, 4, 6, 7, 8, 11], [5, 9, 10]]
"""Samples of each optimizer step."""
TEXTS = [[0, 7], [4]]
"""Samples that the steps take along as texts, in one of the cases."""
LEFT_OUT = {1, 8}
"""Samples that actor and critic learn nothing from."""
TEMPERATURE, KL_COEF = 0.9, 0.3
SETTINGS = Optimizer(lr=0.5, eps=1.0, weight_decay=0.0, clip_grad=1.0)
"""With an eps far above every gradient Adam's step is in proportion to it, and so is its error. At a rate of 1 the
ratios of the second step have a variance of 96, and some processors round them by more than 1e-5."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained.

    Args:
        algo: fields of the algorithm.
        critic: whether the critic is trained with it, or the actor.
        texts: share of the texts in the whole; None takes none along.
    """

    algo: Mapping[str, Any]
    critic: bool = False
    texts: float | None = None


def _kl(estimator: str, **fields: Any) -> dict[str, Any]:
    return {"in": "loss", "estimator": estimator, "coef": KL_COEF, **fields}


def _stale(method: str, weights: str) -> dict[str, Any]:
    return {"old_logprobs": method, "weights": {"name": weights, "upper": 1.1, "lower": 0.8}}


CASES: dict[str, Case] = {
    "ppo": Case(algo={"policy_loss": {"name": "ppo", "clip": 0.1, "dual_clip": 1.2}, "entropy_coef": 0.01}),
    "ppo with texts": Case(algo={"policy_loss": {"name": "ppo", "clip": 0.1, "clip_high": 0.2}}, texts=0.5),
    "gspo": Case(algo={"policy_loss": {"name": "gspo", "clip": 0.02}, "aggregation": "sequence_mean"}),
    "cispo": Case(algo={"policy_loss": "cispo", "aggregation": "token_sum", "kl": _kl("k2")}),
    "cispo_upper": Case(
        algo={"policy_loss": {"name": "cispo_upper", "max_ratio": 1.1}, "aggregation": "sequence_sum", "kl": _kl("abs")}
    ),
    "sapo": Case(
        algo={
            "policy_loss": "sapo",
            "aggregation": {"name": "sequence_sum_norm", "tokens": 9},
            "kl": _kl("k3+", importance=True),
        }
    ),
    "gmpo": Case(algo={"policy_loss": {"name": "gmpo", "clip": 0.1}, "aggregation": "sequence_mean", "kl": _kl("k3")}),
    "reinforce": Case(algo={"policy_loss": "reinforce", "kl": _kl("k1")}),
    "sft": Case(algo={"policy_loss": "sft"}),
    "whole distributions": Case(algo={"kl": _kl("full")}),
    "masked sequences": Case(algo={"correction": {"sequence_mask": {"delta": 0.02}}, "kl": _kl("k1+")}),
    "stale token_truncate": Case(algo={"correction": _stale("loglinear", "token_truncate")}),
    "stale token_mask": Case(algo={"correction": _stale("linear", "token_mask")}),
    "stale sequence_truncate": Case(algo={"correction": _stale("loglinear", "sequence_truncate")}),
    "stale sequence_mask": Case(algo={"correction": _stale("loglinear", "sequence_mask")}),
    "stale geometric_truncate": Case(algo={"correction": _stale("linear", "geometric_truncate")}),
    "stale geometric_mask": Case(algo={"correction": _stale("linear", "geometric_mask")}),
    "own policy loss": Case(algo={"policy_loss": {"name": f"{__name__}:own_policy_loss", "args": {"scale": 2.0}}}),
    "own value loss": Case(algo={"value_loss": f"{__name__}:own_value_loss"}, critic=True),
    "mse": Case(algo={"value_loss": {"name": "mse", "clip": 0.1}}, critic=True),
    "mse unclipped": Case(algo={"value_loss": {"name": "mse", "clip": None}, "aggregation": "token_sum"}, critic=True),
    "huber": Case(
        algo={"value_loss": {"name": "huber", "delta": 0.5}, "aggregation": "sequence_mean"},
        critic=True,
    ),
}


def own_policy_loss(
    new_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    scale: float,
) -> LossTerms:
    """A user's own, which tells nothing."""
    return LossTerms(values=-scale * advantages * (new_logprobs - old_logprobs).exp(), metrics={})


def own_value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor) -> LossTerms:
    """A user's own, which tells nothing."""
    return LossTerms(values=(values - returns).abs(), metrics={})


def samples() -> list[SampleInfo]:
    """The driver's records of the samples."""
    return [
        SampleInfo(
            sample_id=f"{i}:0",
            prompt_id=str(i),
            chunk=i // 3,
            row=i % 3,
            prompt_tokens=prompt,
            response_tokens=response,
            finished=True,
        )
        for i, (prompt, response) in enumerate(LENGTHS)
    ]


def chunks() -> list[TextChunk]:
    """Random tokens."""
    rng = np.random.default_rng(0)
    rows = [(rng.integers(100, size=prompt), rng.integers(100, size=response)) for prompt, response in LENGTHS]
    return [
        TextChunk(
            sample_ids=tuple(f"{i}:0" for i in range(start, start + 3)),
            prompt_ids=Ragged.from_rows([prompt for prompt, _ in rows[start : start + 3]], np.int32),
            response_ids=Ragged.from_rows([response for _, response in rows[start : start + 3]], np.int32),
        )
        for start in range(0, len(rows), 3)
    ]


def experience(logprobs: Mapping[int, Ragged]) -> dict[int, ExperienceChunk]:
    """Random columns around the actor's log-probabilities; every clip and mask of the cases has an effect."""
    rng = np.random.default_rng(1)

    def near(values: Ragged, scale: float) -> Ragged:
        noise = rng.normal(size=len(values.values)) * scale
        return Ragged(values=(values.values + noise).astype(np.float32), offsets=values.offsets)

    def weights(values: Ragged) -> Ragged:
        uniform = rng.uniform(0.5, 1.5, size=len(values.values))
        return Ragged(values=uniform.astype(np.float32), offsets=values.offsets)

    def kept(chunk: int, values: Ragged) -> Ragged:
        per_row = [0.0 if 3 * chunk + row in LEFT_OUT else 1.0 for row in range(3)]
        return Ragged(values=np.repeat(per_row, values.lengths).astype(np.float32), offsets=values.offsets)

    made = {}
    for index, chunk in enumerate(chunks()):
        own = logprobs[index]
        zero = Ragged(values=np.zeros_like(own.values), offsets=own.offsets)
        rollout = near(own, 0.1)
        signs = np.repeat(rng.choice([-1.0, 1.0], size=3), own.lengths).astype(np.float32)
        made[index] = ExperienceChunk(
            sample_ids=chunk.sample_ids,
            prompt_ids=chunk.prompt_ids,
            response_ids=chunk.response_ids,
            old_logprobs=near(own, 0.15),
            ref_logprobs=near(own, 0.5),
            rollout_logprobs=rollout,
            proximal_weights=Ragged(values=rng.uniform(size=len(own.values)).astype(np.float32), offsets=own.offsets),
            old_values=near(zero, 0.5),
            advantages=Ragged(values=signs * np.abs(near(zero, 1.0).values), offsets=own.offsets),
            returns=near(zero, 1.0),
            weights=weights(own),
            actor_mask=kept(index, own),
            scored_mask=kept(index, own),
        )
    return made


def updates(
    rank: int, directory: Path, layout: Layout, budget: int, stored: Path
) -> dict[str, tuple[list[dict[str, float]], float]]:
    """Two optimizer steps of every case, each from the weights of the model.

    Args:
        stored: where a single rank leaves the experience and the weights that others are compared with.

    Returns:
        By case, the metrics of the steps on reporting ranks, and how far a weight of this rank, or its average, is
        from that of the single rank, relative to the largest move of any.
    """
    cache = GroupCache()
    roles: dict[str, Any] = {}
    start: dict[str, dict[str, torch.Tensor]] = {}
    for name in ("actor", "critic"):
        head = random_head(directory) if name == "critic" else None
        roles[name] = load_role(directory, name, layout, rank, cache, trainable=True, head=head)
        roles[name].start_training(SETTINGS, total_steps=2, decay=0.6)
        start[name] = weights_of(roles[name])
    reference = load_role(directory, "reference", layout, rank, cache)
    for value in reference.model.parameters().values():
        value.data.mul_(1.3)  # to differ from the actor
    if not stored.exists():
        passes = inference_schedule(samples(), layout, budget).ranks[0]
        logprobs = logprobs_by_chunk(roles["actor"], passes, chunks(), TEMPERATURE)
        stored.mkdir()
        (stored / "experience").write_bytes(pickle.dumps(experience(logprobs)))
    columns = pickle.loads((stored / "experience").read_bytes())
    found = {}
    for name, case in CASES.items():
        role = roles["critic" if case.critic else "actor"]
        restart(role, start[role.name])
        steps = two_steps(role, case, columns, budget, reference)
        found[name] = (steps if role.reports else [], deviation(role, start[role.name], stored / f"{name}.pt"))
    return found


def restart(role: Any, start: Mapping[str, torch.Tensor]) -> None:
    """Gives a role these weights, with a fresh optimizer and EMA."""
    for name, parameter in role.model.parameters().items():
        parameter.data.copy_(start[name])
    role.steps_taken = role.adam_steps = 0
    for shard in shards(role.model, role.optimizer):
        shard.optimizer.state.pop(shard.main, None)
        role.ema.values[shard.name].copy_(shard.main.detach())


def two_steps(role: Any, case: Case, columns: Any, budget: int, reference: Any = None) -> list[dict[str, float]]:
    """The steps of a case."""
    algo, everything = Algo.model_validate({"mini_batches": len(STEPS), **case.algo}), samples()
    plans = [step_schedule([everything[i] for i in members], role.layout, budget) for members in STEPS]
    aux = None
    if case.texts is not None:
        texts = on_all_tokens(everything)
        along = [step_schedule([texts[i] for i in members], role.layout, budget) for members in TEXTS]
        pairs = [under_one_length(*pair) for pair in zip(plans, along, strict=True)]
        plans = [own for own, _ in pairs]
        batch = UpdateRequest(schedules=[text.ranks[role.coords.dp] for _, text in pairs], chunks=chunks())
        aux = batch, partial(text_loss, role, mix_share=case.texts)
    if case.critic:
        make_loss = partial(value_loss, role, algo, columns)
    else:
        share = 1 - (case.texts or 0.0)
        spec = PolicySpec(algo=algo, temperature=TEMPERATURE, share=share)
        make_loss = partial(PolicyLoss, role, spec, columns, kl_coef=KL_COEF, reference=reference)
    return role.update([plan.ranks[role.coords.dp] for plan in plans], columns, make_loss, aux)


def deviation(role: Any, start: Mapping[str, torch.Tensor], stored: Path) -> float:
    """How far weights and average are from those stored, at most, relative to the largest move of a weight.

    A single rank stores its own, where nothing is stored yet.
    """
    held = _held(role)
    if not stored.exists():
        moves = [(value.detach() - start[key]).abs().max() for key, value in role.model.parameters().items()]
        shapes = {name: tensor.shape for name, tensor in role.spec.canonical(role.head).items()}
        whole = {(kind, name): torch.empty(shapes[name]) for kind, name, _, _ in held}
        for kind, name, region, values in held:
            whole[kind, name][region] = values
        torch.save((max(moves), whole), stored)
        return 0.0
    largest, expected = torch.load(stored)
    away = [(values - expected[kind, name][region]).abs().max() for kind, name, region, values in held]
    return float(max(away) / largest)


def _held(role: Any) -> list[tuple[str, str, Any, torch.Tensor]]:
    """This rank's shards of the canonical tensors: weights, then their average."""
    held = []
    for kind in ("weight", "average"):
        role.ema.swap_weights(kind == "average")
        held += [(kind, *part) for part in shards_of(role, weights_of(role))]
    role.ema.swap_weights(False)
    return held
