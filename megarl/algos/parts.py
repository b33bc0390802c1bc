"""The algorithms behind a single field each, which are no choice by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from megarl.algos import (
    advantages,
    kl,
    m2po,
    metrics,
    normalization,
    optimization,
    overlong,
    reward_shaping,
    rollout_correction,
    selection,
    value_loss,
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """An algorithm.

    Args:
        title: of those that it belongs to.
        field: of the configuration that asks for it.
        choice: the field's value that does; None for any, or for the field's being there.
        function: itself.
    """

    title: str
    field: str
    choice: str | None = None
    function: Callable[..., Any]


_REWARDS, _SCORES, _STALE = "Rewards of tokens", "Scores", "Rollouts of another policy"
_UPDATES, _VALUES, _MODELS, _HELD_OUT = "Optimizer steps", "Values", "Scale of reward models", "Evaluations"

PARTS: Final[tuple[Part, ...]] = (
    Part(title=_SCORES, field="algo.scores.clip", function=reward_shaping.clip_scores),
    Part(title=_SCORES, field="algo.scores.truncate_at", function=reward_shaping.first_end),
    Part(title=_SCORES, field="algo.scores.missing_end", choice="mask", function=reward_shaping.keep_finished),
    Part(title=_SCORES, field="reward.functions", choice="soft_overlong", function=overlong.overlong_penalty),
    Part(title=_REWARDS, field="algo.kl.coef", function=reward_shaping.kl_penalties),
    Part(title=_REWARDS, field="algo.kl.target", function=kl.AdaptiveKL),
    Part(title=_REWARDS, field="algo.scores.placement", function=reward_shaping.token_rewards),
    Part(title=_REWARDS, field="reward.dense", function=reward_shaping.dense_rewards),
    Part(title=_REWARDS, field="algo.normalise.rewards", function=normalization.whiten_rewards),
    Part(title=_REWARDS, field="algo.kl.cumulative", function=advantages.from_outcomes),
    Part(title=_STALE, field="algo.correction.old_logprobs", function=rollout_correction.proximal_logprobs),
    Part(title=_STALE, field="algo.correction.reject", function=rollout_correction.rejection),
    Part(title=_STALE, field="algo.correction.sequence_mask", function=rollout_correction.off_policy_sequences),
    Part(title=_STALE, field="algo.correction.m2po", function=m2po.m2po),
    Part(title=_UPDATES, field="algo.mini_batches", function=optimization.divided),
    Part(title=_UPDATES, field="algo.early_stop", function=optimization.exceeds_target),
    Part(title=_UPDATES, field="ptx.mode", function=optimization.ptx_shares),
    Part(title=_UPDATES, field="actor.ema", function=optimization.ema),
    Part(title=_UPDATES, field="algo.kl.reference_sync", function=optimization.ema),
    Part(title=_UPDATES, field="actor.optimizer.adam", choice="tensorflow", function=optimization.tensorflow_eps),
    Part(title=_UPDATES, field="actor.optimizer.schedule", choice="anneal", function=optimization.linear_anneal),
    Part(title=_UPDATES, field="raft.strategy", choice="local", function=selection.best_of_groups),
    Part(title=_UPDATES, field="raft.strategy", choice="top", function=selection.best_fraction),
    Part(title=_VALUES, field="critic.value_norm", function=value_loss.updated),
    Part(title=_MODELS, field="reward.head_std", function=reward_shaping.head_std),
    Part(title=_MODELS, field="normalisation", function=reward_shaping.score_scale),
    Part(title=_HELD_OUT, field="evaluation.pass_at", function=metrics.pass_rate),
    Part(title=_HELD_OUT, field="evaluation.samples_per_prompt", function=metrics.clustered_mean),
)
