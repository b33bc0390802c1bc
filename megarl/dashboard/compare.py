"""`megarl compare`: two evaluations of a run, or the last ones of two runs, prompt by prompt."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.errors import UsageError
from megarl.files import read_lines
from megarl.run.paths import RunPaths, read_config
from megarl.run.sinks import flat
from megarl.texts import printable

_SHOWN = 10
"""Prompts in each of the two lists."""
_TEXT = 60
"""Characters of a prompt's text."""


class CompareError(UsageError):
    """There is nothing to compare; the message says why."""


@dataclass(frozen=True, kw_only=True)
class ComparedEvaluation:
    """An evaluation of a run.

    Args:
        metrics: `eval/*` without the prefix.
        prompts: mean score by reward and prompt; prompts without a score are left out.
    """

    run: RunPaths
    step: int
    metrics: Mapping[str, float]
    prompts: Mapping[str, Mapping[str, float]]

    @property
    def name(self) -> str:
        return f"{self.run.path}, step {self.step}"


def compare(arguments: Sequence[str], console: Console | None = None) -> None:
    """Prints what differs; `arguments` are a run and two steps of it, two runs, or one run: its first and last steps.

    Raises:
        CompareError: a run has no such evaluation, or the arguments are others.
    """
    console = console or Console(highlight=False)
    match list(arguments):
        case [run]:
            first = _read(run, "first")
            second = _read(run, "last")
        case [run, step, other] if step.isdigit() and other.isdigit():
            first = _read(run, int(step))
            second = _read(run, int(other))
        case [run, other] if not other.isdigit():
            first = _read(run, "last")
            second = _read(other, "last")
        case _:
            raise CompareError("name a run, a run and two steps of it, or two runs")
    if first.run.path != second.run.path:
        _print_settings(first, second, console)
    _print_metrics(first, second, console)
    for reward in [reward for reward in first.prompts if reward in second.prompts]:
        _print_prompts(reward, first, second, console)


def _read(directory: str, step: int | str) -> ComparedEvaluation:
    """Returns an evaluation; `step` is a number, first or last."""
    run = RunPaths(directory)
    lines = read_lines(run.evaluations)
    if not lines:
        raise CompareError(f"{directory}: no evaluation is there; give the run evaluation.prompts")
    places = {"first": 0, "last": -1}
    chosen = [lines[places[step]]] if isinstance(step, str) else [line for line in lines if line["step"] == step]
    if not chosen:
        steps = ", ".join(str(line["step"]) for line in lines)
        raise CompareError(f"{directory}: no evaluation after step {step}; there are those after {steps}")
    line = chosen[0]
    prompts = dict[str, dict[str, float]]()
    for row in read_lines(run.prompt_scores):
        for reward, scores in row["scores"].items() if row["step"] == line["step"] else ():
            known = [score for score in scores if score is not None]
            if known:
                prompts.setdefault(reward, {})[row["prompt_id"]] = statistics.fmean(known)
    metrics = {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}
    return ComparedEvaluation(run=run, step=line["step"], metrics=metrics, prompts=prompts)


def _print_settings(first: ComparedEvaluation, second: ComparedEvaluation, console: Console) -> None:
    """Prints the fields of the configurations that differ."""
    one, other = (dict(flat(read_config(evaluation.run.config))) for evaluation in (first, second))
    table = Table("setting", str(first.run.path), str(second.run.path), box=None)
    for field in sorted({*one, *other}):
        if one.get(field) != other.get(field) and field != "run.dir":
            values = (str(fields.get(field, "-")) for fields in (one, other))
            table.add_row(*(Text(printable(text)) for text in (field, *values)))
    if table.rows:
        console.print(table)
        console.print()


def _print_metrics(first: ComparedEvaluation, second: ComparedEvaluation, console: Console) -> None:
    """Prints the metrics that both evaluations have, with half the widths of their intervals."""
    table = Table("metric", first.name, second.name, box=None)
    for name in [name for name in first.metrics if name in second.metrics and not name.endswith("_ci95")]:
        values = (_with_interval(evaluation.metrics, name) for evaluation in (first, second))
        table.add_row(Text(printable(name)), *values)
    console.print(table)


def _with_interval(metrics: Mapping[str, Any], name: str) -> str:
    values = [f"{value:.4g}" for value in (metrics[name], metrics.get(f"{name}_ci95")) if value is not None]
    return " ± ".join(values) or "-"


def _print_prompts(reward: str, first: ComparedEvaluation, second: ComparedEvaluation, console: Console) -> None:
    """Prints how many prompts score better and worse, and those whose scores change most."""
    before = first.prompts[reward]
    after = second.prompts[reward]
    change = {prompt: after[prompt] - before[prompt] for prompt in before if prompt in after}
    if not change:
        return
    better = sum(value > 0 for value in change.values())
    worse = sum(value < 0 for value in change.values())
    same = len(change) - better - worse
    console.print(
        f"\n{printable(reward)}, of {len(change)} prompts: {better} better, {worse} worse, {same} the same",
        markup=False,
    )
    order = sorted(change, key=lambda prompt: change[prompt])
    texts = _texts(first.run)
    for title, prompts in (("better", order[::-1][:_SHOWN]), ("worse", order[:_SHOWN])):
        table = Table(title, "before", "after", "prompt", box=None)
        for prompt in prompts:
            if (change[prompt] > 0) == (title == "better") and change[prompt]:
                named = Text(printable(prompt))
                text = Text(printable(texts.get(prompt, "")))
                table.add_row(named, f"{before[prompt]:.4g}", f"{after[prompt]:.4g}", text)
        if table.rows:
            console.print(table)


def _texts(run: RunPaths) -> dict[str, str]:
    """Returns the beginning of the prompts that the run's samples show."""
    return {line["prompt_id"]: str(line["prompt"])[:_TEXT] for line in read_lines(run.samples)}
