"""`megarl compare`: two evaluations of a run, or the last ones of two runs, prompt by prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.dashboard.status.reading import require_run
from megarl.dashboard.view.sample_index import mean_scores
from megarl.errors import UsageError
from megarl.files import read_lines
from megarl.run.paths import RunPaths
from megarl.texts import printable

_SHOWN = 10
"""Prompts in each of the two lists."""
_TEXT = 60
"""Characters of a prompt's text."""


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


def compare(arguments: Sequence[str]) -> None:
    """Prints what differs; `arguments` are a run and two steps of it, two runs, or one run: its first and last steps.

    Raises:
        UsageError: a run has no such evaluation, or the arguments are others.
    """
    match list(arguments):
        case [run]:
            first = _read(run, 0)
            second = _read(run, -1)
        case [run, step, other] if step.isdecimal() and other.isdecimal():
            first = _read(run, step=int(step))
            second = _read(run, step=int(other))
        case [run, other] if not other.isdecimal():
            first = _read(run, -1)
            second = _read(other, -1)
        case _:
            raise UsageError("name a run, a run and two steps of it, or two runs")
    console = Console(highlight=False)
    table = Table("metric", first.name, second.name, box=None)
    for name in first.metrics:
        if name in second.metrics and not name.endswith("_ci95"):
            _add_row(table, name, _with_interval(first.metrics, name), _with_interval(second.metrics, name))
    console.print(table)
    for reward in first.prompts:
        if reward in second.prompts:
            _print_prompts(reward, first, second, console)


def _read(directory: str, index: int = 0, *, step: int | None = None) -> ComparedEvaluation:
    """Returns the evaluation with an index, of all or of those after a step."""
    run = RunPaths(directory)
    if not run.evaluations.exists():
        require_run(run.path)
    lines = read_lines(run.evaluations)
    if not lines:
        raise UsageError(f"{directory}: no evaluation is there; give the run evaluation.prompts")
    chosen = [line for line in lines if step in (None, line["step"])]
    if not chosen:
        steps = ", ".join(str(line["step"]) for line in lines)
        raise UsageError(f"{directory}: no evaluation after step {step}; there are those after {steps}")
    line = chosen[index]
    prompts = dict[str, dict[str, float]]()
    for row in read_lines(run.prompt_scores):
        if row["step"] != line["step"]:
            continue
        for reward, score in mean_scores(row):
            prompts.setdefault(reward, {})[row["prompt_id"]] = score
    metrics = {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}
    return ComparedEvaluation(run=run, step=line["step"], metrics=metrics, prompts=prompts)


def _add_row(table: Table, *cells: object) -> None:
    table.add_row(*(Text(printable(str(cell))) for cell in cells))


def _with_interval(metrics: Mapping[str, Any], name: str) -> str:
    values = (metrics[name], metrics.get(f"{name}_ci95"))
    return " ± ".join(f"{value:.4g}" for value in values if value is not None) or "-"


def _print_prompts(reward: str, first: ComparedEvaluation, second: ComparedEvaluation, console: Console) -> None:
    """Prints how many prompts score better and worse, and those whose scores change most."""
    before = first.prompts[reward]
    after = second.prompts[reward]
    change = {prompt: after[prompt] - before[prompt] for prompt in before if prompt in after}
    if not change:
        return
    order = sorted(change, key=lambda prompt: change[prompt])
    worse = [prompt for prompt in order if change[prompt] < 0]
    better = [prompt for prompt in reversed(order) if change[prompt] > 0]
    same = len(change) - len(better) - len(worse)
    counts = f"{len(better)} better, {len(worse)} worse, {same} the same"
    console.print(f"\n{printable(reward)}, of {len(change)} prompts: {counts}", markup=False)
    texts: dict[str, str] = {}
    for line in read_lines(first.run.samples):
        if line["kind"] == "evaluation":  # prompts of the training may have the same ids
            texts[line["prompt_id"]] = str(line["prompt"])[:_TEXT]
    for title, prompts in (("better", better), ("worse", worse)):
        table = Table(title, "before", "after", "prompt", box=None)
        for prompt in prompts[:_SHOWN]:
            scores = (f"{before[prompt]:.4g}", f"{after[prompt]:.4g}")
            _add_row(table, prompt, *scores, texts.get(prompt, ""))
        if prompts:
            console.print(table)
