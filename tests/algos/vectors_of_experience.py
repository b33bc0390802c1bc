"""Vectors of normalisation, token advantages and group advantages; see vector_adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.algos import advantages, group_advantages
from megarl.algos import normalization as normal
from megarl.algos.advantages import reinforce, scan
from megarl.algos.group_advantages import Samples
from megarl.algos.normalization import Groups, Reduce, masked_moments, on_mask, standardise, whiten_advantages
from megarl.algos.registry import GROUP_ADVANTAGES
from megarl.algos.reward_shaping import kl_penalties
from megarl.experience.padded_batch import align, flatten, response_mask
from tests.algos.inputs import local, on_ranks

Outputs = dict[str, Any]


def consecutive(rows: int, size: int) -> Groups:
    """Groups of neighbouring rows."""
    return Groups(index=torch.arange(rows // size).repeat_interleave(size), count=rows // size)


def samples_of(scores: Tensor, groups: list[Any], **known: Any) -> Samples:
    """Samples with the given fields; the groups may have any names."""
    names = list(dict.fromkeys(groups))
    usual = {
        "lengths": torch.ones(len(scores), dtype=torch.int64),
        "finished": torch.ones(len(scores)).bool(),
        "scored": torch.ones(len(scores)).bool(),
    }
    return Samples(scores=scores, groups=torch.tensor([names.index(name) for name in groups]), **{**usual, **known})


# ---- normalisation


def whiten(*, x: Tensor, mask: Tensor | None = None, shift_mean: bool = True, ddof: int = 0, **options: Any) -> Outputs:
    mask = torch.ones_like(x).bool() if mask is None else mask
    moments = masked_moments(x, mask, local)
    whitened = standardise(x, mask, local, keep_mean=not shift_mean, ddof=ddof, **options)
    return {"whitened": whitened, "mean": moments.mean, "var": moments.variance_of(ddof)}


def whiten_sharded(*, shards: list[Any], masks: list[Any], ddof: int = 0) -> Outputs:
    ranks = [(torch.tensor(x), torch.tensor(mask).bool()) for x, mask in zip(shards, masks, strict=True)]

    def whitened(x: Tensor, mask: Tensor, reduce: Reduce) -> Tensor:
        return on_mask(standardise(x, mask, reduce, ddof=ddof), mask)

    moments = on_ranks(masked_moments, ranks)[0]
    found = [shard.tolist() for shard in on_ranks(whitened, ranks)]
    return {"whitened": found, "mean": moments.mean, "var": moments.variance_of(ddof)}


def grouped_token_norm(*, adv: Tensor, mask: Tensor, group_size: int) -> Outputs:
    return {"advantages": normal.grouped_tokens(adv, mask, consecutive(len(adv), group_size), local)}


def level_norm(
    *,
    x: Tensor,
    mask: Tensor | None = None,
    mean_level: Any = None,
    std_level: Any = None,
    group_size: int = 1,
    leave_one_out: bool = False,
) -> Outputs:
    mask = torch.ones_like(x).bool() if mask is None else mask
    groups = consecutive(len(x), group_size)
    rows = (len(x), -1)
    normalised = normal.levels(
        x.reshape(rows),
        mask.reshape(rows),
        groups,
        local,
        mean=mean_level,
        std=std_level,
        leave_one_out=leave_one_out,
    )
    return {"out": normalised.reshape(x.shape)}


# ---- advantages of tokens


def gae(
    *, rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor | None = None, mode: str = "carry", **decay: Any
) -> Outputs:
    if mode == "zero":
        rewards, values = on_mask(rewards, mask), on_mask(values, mask)
    if mode != "carry":
        mask = torch.ones_like(mask)
    found, returns = scan(rewards, values, mask, bootstrap, **{"gamma": 1.0, "lam": 0.95, **decay})
    return {"advantages": found, "returns": returns}


def gae_valid(*, rewards: Tensor, values: Tensor, mask: Tensor, **decay: float) -> Outputs:
    found, returns = advantages.gae(rewards, values, mask, **decay)
    return {"advantages": found, "returns": returns}


def gae_packed(*, rewards: Tensor, values: Tensor, cu_short: Tensor, truncated: Tensor, **decay: float) -> Outputs:
    """Rows from packed sequences: of the L + 1 values of one, the last is that of the state after it."""
    lengths = cu_short.diff().tolist()
    rows = values.split([length + 1 for length in lengths])
    mask = response_mask(lengths)
    bootstrap = torch.stack([row[-1] for row in rows]).masked_fill(~truncated, 0.0)
    states = align(torch.cat([row[:-1] for row in rows]), mask)
    found, returns = advantages.gae(align(rewards, mask), states, mask, bootstrap, **decay)
    return {"advantages": flatten(found, mask), "returns": flatten(returns, mask)}


def gae_decoupled(*, rewards: Tensor, values: Tensor, mask: Tensor, **decay: float) -> Outputs:
    found, returns = advantages.vapo(rewards, values, mask, **decay)
    return {"advantages": found, "returns": returns}


def discounted_returns(*, rewards: Tensor, mask: Tensor, gamma: float, mode: str) -> Outputs:
    assert mode == "zero"
    rewards = on_mask(rewards, mask)
    return {"returns": advantages.discounted_returns(rewards, torch.ones_like(mask), gamma=gamma)}


def reinforce_pp(*, rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Outputs:
    returns, _ = reinforce(rewards, None, mask, gamma=gamma)
    whitened = whiten_advantages(returns, mask, consecutive(len(mask), 1), local, ddof=1)
    return {"advantages": whitened, "returns": returns}


# ---- group advantages


def outcome_advantages(
    *, rewards: Tensor, groups: list[Any], kind: str, lengths: Tensor | None = None, **options: Any
) -> Outputs:
    known = {} if lengths is None else {"lengths": lengths}
    if kind in ("grpo", "dr_grpo", "rloo", "opo"):
        options = {"singleton": "raw", **options}
    compare = GROUP_ADVANTAGES.function({"loo_std": "rloo_std"}.get(kind, kind))
    return {"advantages": compare(samples_of(rewards, groups, **known), **options)}


def broadcast_advantages(*, seq_adv: Tensor, mask: Tensor) -> Outputs:
    return {"advantages": advantages.broadcast_advantages(seq_adv, torch.zeros(mask.shape), mask)}


def reinforce_pp_baseline(
    *,
    scores: Tensor,
    groups: list[Any],
    kl: Tensor,
    mask: Tensor,
    coef: float,
    kl_mode: str = "cumulative",
    **options: Any,
) -> Outputs:
    outcomes = group_advantages.dr_grpo(samples_of(scores, groups))
    penalties = kl_penalties(kl, mask, kl_coef=coef)
    raw = advantages.broadcast_advantages(outcomes, penalties, mask, cumulative=kl_mode == "cumulative")
    whitened = whiten_advantages(raw, mask, consecutive(len(mask), 1), local, **{"form": "var_clamp", **options})
    return {"advantages": whitened, "raw": raw}


def remax(*, rewards: Tensor, mask: Tensor, baseline_scores: Tensor) -> Outputs:
    """The case has token rewards only: they replace the penalties, and the scores are 0."""
    scores = torch.zeros_like(baseline_scores)
    alone = samples_of(scores, list(range(len(scores))), greedy_scores=baseline_scores)
    returns, _ = reinforce(rewards, None, mask)
    found = advantages.broadcast_advantages(group_advantages.remax(alone), rewards, mask)
    return {"advantages": found, "returns": returns}


def gdpo(*, components: Tensor, groups: list[Any], mask: Tensor, weights: list[float]) -> Outputs:
    samples = samples_of(components[0], groups, components=components.T, weights=weights)
    outcomes = group_advantages.gdpo(samples)
    tokens = advantages.broadcast_advantages(outcomes, torch.zeros(mask.shape), mask)
    whitened = whiten_advantages(tokens, mask, consecutive(len(mask), 1), local, ddof=1)
    return {"sequence": outcomes, "advantages": whitened}
