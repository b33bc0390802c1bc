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
    steps = 1 if data is None else _steps(config, config.run.epochs, data)[0]
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})


def epoch_problems(config: RunConfig, data: Sets) -> Iterator[Problem]:
    """Checks the steps of a run's epochs; nothing where rows could not be read."""
    if not isinstance(config, TrainingConfig) or config.run.epochs is None:
        return
    epochs = config.run.epochs
    given = config.run.steps
    steps, division = _steps(config, epochs, data)
    if not data.rows.get(config.rows_field):
        return
    if steps == 0:
        yield Problem(
            "run.epochs", f"{epochs:g}", f"at least a step; {division} is 0", "raise it, or take smaller steps"
        )
    elif given not in (None, steps):
        rule = f"does not fit run.epochs = {epochs:g}: {division} is {steps}"
        yield Problem("run.steps", str(given), rule, "give one of the two, and set the other to null")
    else:
        resolved = with_steps(config, data)
        yield from broken_rules(config.stage, {name: getattr(resolved, name) for name in type(config).model_fields})


def _steps(config: TrainingConfig, epochs: float, data: Sets) -> tuple[int, str]:
    """Returns the whole steps of some epochs, and the division in words."""
    rows = len(data.rows.get(config.rows_field, ()))
    size = config.rows_per_step
    steps = Fraction(str(epochs)) * rows // size
    return steps, f"{epochs:g} times {rows} usable rows, divided by the {size} of a step and rounded down,"
