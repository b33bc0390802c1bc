"""Rules between fields. A rule is a function of the sections that it reads, by name, and yields problems."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megarl.config.problems import Problem
from megarl.config.rules import (
    algorithm,
    corrections,
    data,
    generation,
    model,
    penalty,
    placement,
    resharding,
    scoring,
    training,
)
from megarl.config.schema import STAGES

Rule = Callable[..., Iterator[Problem]]

_ALL = (*placement.RULES, *model.RULES, *data.RULES)

_ROLLOUTS = (
    *_ALL,
    *generation.RULES,
    generation.record_or_replay,
    generation.samples_differ,
    model.checkpoints_share_the_tokens,
    data.one_prompt_source,
    data.random_prompts_are_ids,
    data.lengths_fit,
    *resharding.RULES,
    scoring.scores_have_a_source,
    *scoring.RULES,
    scoring.averages_are_kept,
    corrections.old_weights_are_kept,
    corrections.syncs_meet,
    training.actor_rate_falls,
)
"""Of the stages that train on rollouts."""

RULES: Mapping[str, tuple[Rule, ...]] = {
    "sft": (*_ALL, generation.nothing_to_show, data.evaluations_have_rows, training.actor_rate_falls),
    "reward_model": (
        *_ALL,
        *generation.RULES,
        generation.nothing_to_record,
        generation.nothing_to_show,
        data.lengths_fit,
        data.evaluations_have_rows,
        data.reference_samples_have_engines,
        training.reward_rate_falls,
        training.margins_are_read,
    ),
    "ppo": (
        *_ROLLOUTS,
        *algorithm.RULES,
        *penalty.RULES,
        *corrections.RULES,
        data.mini_batches_are_equal,
        data.texts_are_mixed_in,
        scoring.shaped_scores_are_compared,
        scoring.masked_comparisons_mask,
        scoring.dense_scores_are_read,
        scoring.scores_end_within_responses,
        training.critic_rate_falls,
    ),
    "raft": (
        *_ROLLOUTS,
        data.selections_fill_mini_batches,
        data.discarded_ends_have_no_score,
        scoring.selections_read_scores,
    ),
    "eval": (
        *_ALL,
        *generation.RULES,
        generation.nothing_to_record,
        generation.samples_differ,
        model.checkpoints_share_the_tokens,
        data.lengths_fit,
        *scoring.RULES,
        scoring.nothing_is_learnt,
    ),
}
"""By stage."""


def broken_rules(stage: str, sections: Mapping[str, Any]) -> list[Problem]:
    """Every problem between fields, of the stage's rules whose sections are all sound.

    Args:
        stage: of the configuration.
        sections: its fields by name; one that is not sound in itself is left out. A section that the stage does not
            have is None for the rules.
    """
    known = STAGES[stage].model_fields
    problems: list[Problem] = []
    for rule in RULES[stage]:
        reads = inspect.signature(rule).parameters
        if all(name in sections for name in reads if name in known):
            problems.extend(rule(**{name: sections.get(name) for name in reads}))
    return problems
