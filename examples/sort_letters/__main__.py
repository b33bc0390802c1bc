"""The demo from seed to results: ``python -m examples.sort_letters [--seed N]``, at the root of the repository."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.sort_letters.checkpoint import write_checkpoint
from examples.sort_letters.curves import draw_curves
from examples.sort_letters.data import write_data
from examples.sort_letters.memory import MemoryWatch
from examples.sort_letters.report import print_costs, print_results, print_samples
from examples.sort_letters.results import evaluations, run_seconds, samples, summary
from examples.sort_letters.stages import CONFIGS, StageError, raise_on_sigterm, train

DIRECTORY = Path("runs/demo")
"""As the files in configs/demo have it."""
STAGES = ("sft", "reward_model", "ppo")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Seed = Annotated[int, typer.Option(help="Of the model, the data and the runs.")]
Control = Annotated[
    bool, typer.Option("--control", help="PPO once more on the results of the last demo, with shuffled rewards.")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings of all stages.")]


@app.command()
def main(overrides: Overrides = None, seed: Seed = 0, control: Control = False) -> None:
    """Train a small model to sort letters: supervised fine-tuning, a reward model, PPO."""
    console = Console(highlight=False)
    if not CONFIGS.is_dir():
        console.print(f"There is no {CONFIGS} here: start the demo where the repository is.")
        raise typer.Exit(2)
    raise_on_sigterm()
    settings = [f"run.seed={seed}", *(overrides or [])]
    try:
        if control:
            run_control(settings, console)
        else:
            run_demo(seed, settings, console)
    except StageError as error:
        console.print(str(error), style="bold red")
        raise typer.Exit(error.status) from None


def run_demo(seed: int, settings: Sequence[str], console: Console) -> None:
    """Makes model and data, runs the three stages, and shows what came of them; an earlier demo's files go.

    Raises:
        StageError: a stage failed.
    """
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    with MemoryWatch() as memory:
        seconds = {"data": make_inputs(seed, console)}
        for stage in STAGES:
            train(stage, settings, memory.environment, console)
            seconds[stage] = run_seconds(DIRECTORY / stage)
    peak_memory_gb = memory.peak_bytes / 1e9
    results = {"seed": seed, **summary(DIRECTORY), "seconds": seconds, "peak_memory_gb": peak_memory_gb}
    (DIRECTORY / "summary.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw_curves(DIRECTORY, DIRECTORY / "curves.png")
    console.print("\nresults", style="bold")
    show(DIRECTORY / "ppo", "PPO against the reward model", console)
    print_costs(seconds, peak_memory_gb, DIRECTORY, console)


def run_control(settings: Sequence[str], console: Console) -> None:
    """Runs the PPO stage again with each sample given the score of another, so that there is nothing to learn.

    Raises:
        StageError: the stage failed.
    """
    directory = DIRECTORY / "control"
    shutil.rmtree(directory, ignore_errors=True)
    train("ppo", [f"run.dir={directory}", "reward.shuffle=true", *settings], os.environ, console)
    show(directory, "control: PPO with shuffled rewards", console)


def make_inputs(seed: int, console: Console) -> float:
    """Writes the model and the data; returns the seconds that it took."""
    console.print("making the model and the data", style="bold")
    start = time.perf_counter()
    write_checkpoint(DIRECTORY / "model", seed)
    write_data(DIRECTORY / "data", seed)
    return time.perf_counter() - start


def show(run_dir: Path, title: str, console: Console) -> None:
    """Prints the held-out results of a PPO run."""
    before, *_, after = evaluations(run_dir)
    print_samples(samples(run_dir, before.step), samples(run_dir, after.step), console)
    print_results(before, after, title, console)


if __name__ == "__main__":
    app()
