"""Rules between fields. A rule is a function of the sections that it reads, by name, and yields problems."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megarl.config.problems import Problem
from megarl.config.rules import algorithm, data, generation, model, placement, resharding, training
from megarl.config.schema import STAGES

Rule = Callable[..., Iterator[Problem]]

_ALL = (*placement.RULES, *model.RULES, *data.RULES)

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
    ),
    "ppo": (
        *_ALL,
        *generation.RULES,
        generation.record_or_replay,
        model.checkpoints_share_the_tokens,
        data.one_prompt_source,
        data.random_prompts_are_ids,
        data.mini_batches_are_equal,
        data.lengths_fit,
        *algorithm.RULES,
        *resharding.RULES,
        training.actor_rate_falls,
        training.critic_rate_falls,
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
