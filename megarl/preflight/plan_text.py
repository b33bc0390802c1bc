"""Phrases in the plan of a run."""

from __future__ import annotations

import sys

import yaml

from megarl.config.schema import Choice, Rollout
from megarl.config.schema.base import Section
from megarl.texts import counted


def lengths_text(rollout: Rollout) -> str:
    return f"up to {rollout.max_new_tokens} new tokens, {rollout.max_model_len} with the prompt"


def epochs_text(steps: int, size: int, count: int) -> str:
    """Describes how often the steps of a run, of ``size`` rows each, go over ``count`` rows."""
    epochs = f"{steps * size / count:.3g}"
    noun = "epoch" if epochs == "1" else "epochs"
    return f"{epochs} {noun} in {counted(steps, 'step')} of {size}"


def evaluation_times(every: int | None) -> str:
    return "before the first step and after the last" if every is None else every_steps(every)


def every_steps(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def section_text(section: Section) -> str:
    """Writes the fields of a section that are set, as YAML in one line."""
    fields = section.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(fields, default_flow_style=True, sort_keys=False, width=sys.maxsize).strip()


def choice_text(choice: Choice) -> str:
    """Describes a choice with its options that are neither null nor false."""
    options: list[str] = []
    for key, value in choice.options.items():
        if value is not None and value is not False:
            options.append(f"{key} {_option_text(value)}")
    name = dict(choice)["name"]
    return f"{name} ({', '.join(options)})" if options else str(name)


def _option_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "yes" if value is True else str(value)
