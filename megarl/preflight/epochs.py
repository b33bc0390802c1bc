"""The steps of a run whose length is given in epochs: known when its rows are read."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from megarl.config import Problem, RunConfig, TrainingConfig
from megarl.config.rules import broken_rules
from megarl.preflight.datasets import Sets


def with_steps[C: RunConfig](config: C, data: Sets | None = None) -> C:
    """Returns a configuration with the steps of its epochs; without data with one, a stand-in.

    `check` has found no problem with them.
    """
    if not isinstance(config, TrainingConfig) or config.run.epochs is None:
        return config
    steps = 1
    if data is not None:
        rows = len(data.rows[config.rows_field])
        steps = Fraction(str(config.run.epochs)) * rows // config.rows_per_step
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})


def epoch_problems(config: RunConfig, data: Sets) -> Iterator[Problem]:
    """Checks the steps of a run's epochs; nothing where rows could not be read."""
    if not isinstance(config, TrainingConfig) or config.run.epochs is None:
        return
    rows = len(data.rows.get(config.rows_field, ()))
    if rows == 0:
        return
    epochs = f"{config.run.epochs:g}"
    resolved = with_steps(config, data)
    steps = resolved.run.steps
    size = config.rows_per_step
    division = f"{epochs} times {rows} usable rows, divided by the {size} of a step"
    division += " and rounded down,"
    if steps == 0:
        rule = f"at least a step; {division} is 0"
        yield Problem("run.epochs", epochs, rule, "raise it, or take smaller steps")
    elif config.run.steps not in (None, steps):
        rule = f"does not fit run.epochs = {epochs}: {division} is {steps}"
        fix = "give one of the two, and set the other to null"
        yield Problem("run.steps", str(config.run.steps), rule, fix)
    else:
        yield from broken_rules(config.stage, {name: getattr(resolved, name) for name in type(config).model_fields})
