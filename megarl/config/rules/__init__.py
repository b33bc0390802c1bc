"""Rules between fields. A rule is a function of the sections that it reads, by name, and yields problems."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megarl.config.problems import Problem
from megarl.config.rules import (
    algorithm_rules,
    data_rules,
    model_rules,
    placement_rules,
    rollout_rules,
    scoring_rules,
    training_rules,
)
from megarl.config.schema import STAGES

Rule = Callable[..., Iterator[Problem]]

_ALL = (*placement_rules.RULES, *model_rules.RULES, *data_rules.RULES)

_ROLLOUTS = (
    *_ALL,
    *rollout_rules.RULES,
    rollout_rules.record_or_replay,
    rollout_rules.samples_differ,
    model_rules.checkpoints_share_the_tokens,
    data_rules.one_prompt_source,
    data_rules.random_prompts_are_ids,
    data_rules.lengths_fit,
    *rollout_rules.RESHARDING_RULES,
    scoring_rules.scores_have_a_source,
    *scoring_rules.RULES,
    training_rules.averages_are_kept,
    rollout_rules.old_weights_are_kept,
    rollout_rules.syncs_meet,
    training_rules.actor_rate_falls,
)
"""Of the stages that train on rollouts."""

RULES: Mapping[str, tuple[Rule, ...]] = {
    "sft": (*_ALL, rollout_rules.nothing_to_show, data_rules.evaluations_have_rows, training_rules.actor_rate_falls),
    "reward_model": (
        *_ALL,
        *rollout_rules.RULES,
        rollout_rules.nothing_to_record,
        rollout_rules.nothing_to_show,
        data_rules.lengths_fit,
        data_rules.evaluations_have_rows,
        data_rules.reference_samples_have_engines,
        training_rules.reward_rate_falls,
        training_rules.margins_are_read,
    ),
    "ppo": (
        *_ROLLOUTS,
        *algorithm_rules.RULES,
        training_rules.epochs_can_stop,
        training_rules.warm_ups_end,
        training_rules.value_heads_have_a_source,
        training_rules.mini_batches_are_equal,
        training_rules.texts_are_mixed_in,
        scoring_rules.shaped_scores_are_compared,
        scoring_rules.masked_comparisons_mask,
        scoring_rules.dense_scores_are_read,
        scoring_rules.scores_end_within_responses,
        training_rules.critic_rate_falls,
    ),
    "raft": (
        *_ROLLOUTS,
        training_rules.selections_fill_mini_batches,
        data_rules.discarded_ends_have_no_score,
        scoring_rules.selections_read_scores,
    ),
    "eval": (
        *_ALL,
        *rollout_rules.RULES,
        rollout_rules.nothing_to_record,
        rollout_rules.samples_differ,
        model_rules.checkpoints_share_the_tokens,
        data_rules.lengths_fit,
        *scoring_rules.RULES,
        scoring_rules.nothing_is_learnt,
    ),
}
"""By stage."""


def broken_rules(stage: str, sections: Mapping[str, Any]) -> list[Problem]:
    """The problems of the stage's rules whose sections are all sound.

    Args:
        sections: the sound ones by name; one that the stage does not have is None for the rules.
    """
    known = STAGES[stage].model_fields
    problems: list[Problem] = []
    for rule in RULES[stage]:
        reads = inspect.signature(rule).parameters
        if all(name in sections for name in reads if name in known):
            problems.extend(rule(**{name: sections.get(name) for name in reads}))
    return problems
