"""What the demo shows at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.sort_letters.results import Estimate, Evaluation, Sample


def print_samples(before: Sequence[Sample], after: Sequence[Sample], console: Console) -> None:
    """Prints answers to the same held-out prompts side by side; those that are right in green."""
    table = Table("held-out prompt", "before PPO", "after PPO")
    for first, last in zip(before, after, strict=True):
        assert first.prompt == last.prompt
        table.add_row(Text(first.prompt), _answer(first), _answer(last))
    console.print(table)


def print_results(before: Evaluation, after: Evaluation, title: str, console: Console) -> None:
    """Prints the held-out results before and after PPO."""
    table = Table("", "before PPO", "after PPO", "change", title=title, caption=_caption(after), min_width=80)
    for name, first, last in (
        ("true score", before.true_score, after.true_score),
        ("reward-model score", before.reward_model_score, after.reward_model_score),
    ):
        table.add_row(name, _shown(first), _shown(last), _shown(last - first, sign="+"))
    console.print(table)


def print_costs(seconds: Mapping[str, float], peak_memory_gb: float, directory: Path, console: Console) -> None:
    """Prints what the demo took, and where its files are."""
    stages = ", ".join(f"{stage} {value:.0f} s" for stage, value in seconds.items())
    console.print(
        f"{sum(seconds.values()):.0f} s ({stages}), at most {peak_memory_gb:.1f} GB of memory", soft_wrap=True
    )
    console.print(f"{directory}: the curves are in curves.png, the numbers in summary.json", soft_wrap=True)


def _caption(evaluation: Evaluation) -> str:
    return f"{evaluation.samples:,} held-out prompts, sampled as in training; 95% intervals"


def _shown(estimate: Estimate, sign: str = "") -> str:
    return f"{estimate.mean:{sign}.3f} ± {estimate.half_width:.3f}"


def _answer(sample: Sample) -> Text:
    return Text(sample.response, style="green" if sample.right else "")
