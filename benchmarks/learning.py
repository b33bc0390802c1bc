"""What every algorithm makes of the demo's task, and GRPO of one with a tool: three seeds of one fine-tuned model.

    python -m benchmarks.learning                              what is done and what is missing
    python -m benchmarks.learning --algorithm grpo --seed 0    one cell
    python -m benchmarks.learning --algorithm decoupled_ppo --staleness 2 --seed 0
    python -m benchmarks.learning --algorithm lookup --seed 0
    python -m benchmarks.learning --next                       the first that is missing
    python -m benchmarks.learning --all                        all that are missing, one after the other
    python -m benchmarks.learning --report                     docs/learning.md and its picture, from the cells

A cell is `megarl train` of a file in configs/learning with a seed and, for some, an age of the samples; from where the
repository is. A cell that was interrupted goes on from its last checkpoint. The first one makes the models that all
start from, in runs/learning; results are small files in benchmarks/results/learning. A result of a file that has
changed since is missing again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from examples.lookup.prepare import prepare
from examples.sort_letters.checkpoint import write_checkpoint
from examples.sort_letters.data import write_data
from examples.sort_letters.results import TRUE_SCORE, read_lines
from megarl.config.inheritance import merged

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONFIGS: Final = Path("configs/learning")
DIRECTORY: Final = Path("runs/learning")
RESULTS: Final = Path("benchmarks/results/learning")
PAGE: Final = Path("docs/learning.md")
PICTURE: Final = Path("docs/learning.svg")
ALGORITHMS: Final = {
    "ppo": "PPO",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "remax": "ReMax",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "raft": "RAFT",
}
"""By the names of their files."""
STALE: Final = {"decoupled_ppo": "decoupled PPO", "coupled_ppo": "coupled PPO"}
"""Those on samples of older weights, likewise."""
CONTROL: Final = {"control": "GRPO, shuffled rewards"}
"""What must not learn, likewise."""
CONVERSATIONS: Final = {"lookup": "GRPO, with a tool"}
"""Those on a task of several turns, likewise."""
CONVERSATION_CONTROL: Final = {"lookup_control": "GRPO with a tool, shuffled rewards"}
"""What must not learn there, likewise."""
STALENESS: Final = (0, 1, 2, 4, 8)
"""How many versions old these samples are."""
Row = tuple[str, int | None]
"""An algorithm, and the age of its samples."""
ROWS: Final[Mapping[Row, str]] = {
    **{(name, None): title for name, title in {**ALGORITHMS, **CONTROL}.items()},
    **{(name, age): f"{title}, {age} old" for name, title in STALE.items() for age in STALENESS},
    **{(name, None): title for name, title in {**CONVERSATIONS, **CONVERSATION_CONTROL}.items()},
}
"""Titles of the rows of the tables."""
SEEDS: Final = (0, 1, 2)
SHARED_SEED: Final = 0
"""Of the data and of the models that all cells start from."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One algorithm with one seed.

    Args:
        staleness: how many versions old all samples are.
    """

    algorithm: str
    seed: int
    staleness: int | None = None

    @property
    def name(self) -> str:
        age = "" if self.staleness is None else f"-s{self.staleness}"
        return f"{self.algorithm}{age}-{self.seed}"

    @property
    def config(self) -> Path:
        return CONFIGS / f"{self.algorithm}.yaml"

    @property
    def run_dir(self) -> Path:
        return DIRECTORY / "cells" / self.name

    @property
    def result(self) -> Path:
        return RESULTS / f"{self.name}.json"

    @property
    def converses(self) -> bool:
        return self.algorithm in {**CONVERSATIONS, **CONVERSATION_CONTROL}

    @property
    def overrides(self) -> list[str]:
        return [] if self.staleness is None else [f"rollout.max_staleness={self.staleness}"]

    def settings(self) -> str:
        """What stands in its file and in those that the file inherits, and its overrides, as a short hash."""
        raw, _ = merged(self.config, self.overrides)
        return hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def read(self) -> dict[str, Any] | None:
        """Its result; None where there is none of these settings."""
        if not self.result.exists():
            return None
        result = json.loads(self.result.read_text(encoding="utf-8"))
        return result if result["settings"] == self.settings() else None


CELLS: Final = tuple(Cell(algorithm=name, seed=seed, staleness=age) for seed in SEEDS for name, age in ROWS)
"""All, in the order in which they are done."""


def main(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    if options.report:
        report()
    elif options.next or options.all:
        missing = [cell for cell in CELLS if cell.read() is None]
        for cell in missing if options.all else missing[:1]:
            work(cell)
        if not missing:
            print("every cell is done: --report writes the page")
    elif options.algorithm is not None:
        work(Cell(algorithm=options.algorithm, seed=options.seed, staleness=options.staleness))
    else:
        for cell in CELLS:
            print(f"{cell.name:20} {'missing' if cell.read() is None else 'done'}")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=sorted({name for name, _ in ROWS}))
    parser.add_argument("--staleness", type=int, choices=STALENESS, help="of decoupled_ppo and coupled_ppo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--next", action="store_true", help="the first cell that is missing")
    parser.add_argument("--all", action="store_true", help="all that are missing, one after the other")
    parser.add_argument("--report", action="store_true", help="write the page and its picture")
    options = parser.parse_args(arguments)
    if (options.algorithm in STALE) == (options.staleness is None):
        parser.error(f"--staleness belongs to {' and '.join(STALE)}, which need it")
    return options


# ---- running


def work(cell: Cell) -> None:
    """Makes a cell's result; an interrupted run of the same settings goes on."""
    share_conversations() if cell.converses else share()
    marker = cell.run_dir / "settings"
    if marker.exists() and marker.read_text(encoding="utf-8") != cell.settings():
        shutil.rmtree(cell.run_dir)
    (cell.run_dir).mkdir(parents=True, exist_ok=True)
    marker.write_text(cell.settings(), encoding="utf-8")
    start = time.perf_counter()
    train(cell.config, f"run.dir={cell.run_dir / 'run'}", f"run.seed={cell.seed}", *cell.overrides)
    result = {
        "algorithm": cell.algorithm,
        "seed": cell.seed,
        **({} if cell.staleness is None else {"staleness": cell.staleness}),
        "settings": cell.settings(),
        "last_invocation_seconds": round(time.perf_counter() - start),
        **measured(cell.run_dir / "run", "environment" if cell.converses else TRUE_SCORE),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    cell.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"{cell.result}: {result['evaluations'][0]['true_score']:.3f} -> {result['evaluations'][-1]['true_score']:.3f}"
    )


def share() -> None:
    """Makes the data, the fine-tuned model and the reward model, where they are not there."""
    if not (DIRECTORY / "data").exists():
        write_checkpoint(DIRECTORY / "model", SHARED_SEED)
        write_data(DIRECTORY / "made", SHARED_SEED)
        (DIRECTORY / "made").rename(DIRECTORY / "data")
    for stage, start in (("sft", "model"), ("reward_model", "sft/export")):
        if (DIRECTORY / stage / "export").exists():
            continue
        kind = "demonstrations" if stage == "sft" else "pairs"
        overrides = [
            f"run.dir={DIRECTORY / stage}",
            f"run.seed={SHARED_SEED}",
            f"model.path={DIRECTORY / start}",
            f"data.train={DIRECTORY / 'data' / kind}_train.jsonl",
            f"data.evaluation={DIRECTORY / 'data' / kind}_held_out.jsonl",
            "checkpoint.every=100",
        ]
        if stage == "reward_model":
            overrides.append(f"normalisation.prompts={DIRECTORY / 'data'}/prompts_train.jsonl")
        train(Path("configs/demo") / f"{stage}.yaml", *overrides)


def share_conversations() -> None:
    """Makes the fine-tuned model of the task with a tool, where it is not there."""
    directory = DIRECTORY / "lookup"
    if (directory / "sft" / "export").exists():
        return
    if not (directory / "sft").exists():
        prepare(directory, SHARED_SEED)
    paths = {"run.dir": "sft", "model.path": "model", "data.train": "demonstrations.jsonl"}
    overrides = [f"{field}={directory / name}" for field, name in paths.items()]
    train(Path("examples/lookup/sft.yaml"), *overrides, f"run.seed={SHARED_SEED}")


def train(config: Path, *overrides: str) -> None:
    """`megarl train` to its end; where it fails, it has said why, and this ends too."""
    status = subprocess.run([sys.executable, "-m", "megarl", "train", str(config), *overrides], check=False).returncode
    if status:
        sys.exit(status)


def measured(run_dir: Path, true_score: str) -> dict[str, Any]:
    """What a run came to: its evaluations, and by step the score of the reward model and the divergence."""
    steps = read_lines(run_dir / "metrics.jsonl")
    return {
        "evaluations": [
            {
                "step": row["step"],
                "samples": row["eval/samples"],
                "true_score": round(row[f"eval/{true_score}"], 4),
                "half_width": round(row[f"eval/{true_score}_ci95"], 4),
                **({"reward_model_score": round(row["eval/score"], 4)} if "eval/score" in row else {}),
            }
            for row in read_lines(run_dir / "evaluations.jsonl")
        ],
        "steps": len(steps),
        "samples": sum(row["rollout/samples"] for row in steps),
        "seconds_in_steps": round(sum(row["time/step"] for row in steps)),
        "score": [round(row["objective/score"], 4) for row in steps],
        "kl": [round(row["objective/kl"], 4) for row in steps if "objective/kl" in row],
    }


# ---- the page


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What an algorithm came to over its seeds: true scores, mean over the seeds.

    Args:
        seeds: that are done.
        spread: the largest end of a seed less the smallest.
        half_width: of the 95% interval of a single seed's end.
        kl: from the fine-tuned model at the end, nats per response; None where it was not measured.
    """

    name: str
    seeds: int
    steps: int
    samples: int
    start: float
    end: float
    smallest_gain: float
    spread: float
    half_width: float
    kl: float | None

    @property
    def learns(self) -> bool:
        """Every seed gains, and the mean gain is beyond the spread of the seeds and the error of an evaluation."""
        return self.smallest_gain > 0 and self.end - self.start > max(self.spread, 2 * self.half_width)


def summed_up(name: str, results: Sequence[Mapping[str, Any]]) -> Summary:
    """One line of the table."""
    starts, ends = zip(*([e["true_score"] for e in _ends(result)] for result in results), strict=True)
    kl = [r["kl"][-1] for r in results if r["kl"]]
    return Summary(
        name=name,
        seeds=len(results),
        steps=results[0]["steps"],
        samples=results[0]["samples"],
        start=statistics.fmean(starts),
        end=statistics.fmean(ends),
        smallest_gain=min(end - start for start, end in zip(starts, ends, strict=True)),
        spread=max(ends) - min(ends),
        half_width=max(r["evaluations"][-1]["half_width"] for r in results),
        kl=statistics.fmean(kl) if kl else None,
    )


def table(summaries: Sequence[Summary]) -> str:
    """Markdown."""
    head = "| algorithm | seeds | steps | samples | start | end | gain | spread of the ends | KL | learns |\n"
    rule = "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    return head + rule + "".join(_row(summary) for summary in summaries)


def _row(s: Summary) -> str:
    kl = "-" if s.kl is None else f"{s.kl:.2f}"
    spread = "-" if s.seeds == 1 else f"{s.spread:.3f}"
    learns = "open" if s.seeds < len(SEEDS) else "yes" if s.learns else "**no**"
    numbers = f"{s.start:.3f} | {s.end:.3f} | {s.end - s.start:+.3f} | {spread} | {kl}"
    return f"| {s.name} | {s.seeds} | {s.steps} | {s.samples:,} | {numbers} | {learns} |\n"


INTRODUCTION: Final = """# Does it learn?

Written by `python -m benchmarks.learning --report` from the results in
[benchmarks/results/learning](../benchmarks/results/learning); do not edit it.

Every algorithm trains on the [demo's](../README.md) task: sort letters, where the answer to `up kdxbq:` is `bdkqx`. All
runs start from the same fine-tuned model, which answers about a third of the prompts correctly, and use the same reward
model. The true score is the share of 1,024 held-out prompts answered exactly right, sampled at temperature 1; no
algorithm sees it. The settings in [configs/learning](../configs/learning) are the recipes of
[configs/recipes](../configs/recipes), and for PPO the defaults, with learning rates and batch sizes for this small
task. RAFT selects the best answer to each prompt and samples four times as many answers per step. Learning rates and
batch sizes were not tuned for each algorithm, so the table is not a ranking.

![true score on held-out prompts, by step](learning.svg)

Start and end are means over the seeds; a single true score has a 95% interval of about ±0.03. An algorithm counts as
learning if every seed gains, and if the mean gain exceeds both the spread of the seeds' end scores and the width of
that interval. KL is the divergence from the fine-tuned model at the last step, in nats per response. The picture has
the 95% interval of each line. Its dashed line is the control, GRPO with the rewards shuffled among the responses, which
must not learn. The last panel has [another task](#in-conversations), of several turns, and its own control.

"""
STALE_SAMPLES: Final = """
## On samples of older weights

In [asynchronous training](async.md) samples are older than the actor. Here all are older by the same number of
versions: mode `exact`, with `rollout.max_staleness` 0, 1, 2, 4 and 8. Decoupled PPO is that of the recipe `areal`:
clipped around the policy before the update, and weighted by its ratio to the policy that sampled, up to 5. Coupled PPO
is clipped around the policy that sampled, without weights.

"""
CONVERSATION_ROWS: Final = """
## In conversations

The task of [examples/lookup](environments.md#an-example) takes several turns: a table is known to the environment
alone, so that a right answer needs a question first. The model is fine-tuned on demonstrations that often ask for a
wrong key and often answer wrongly. The true score, which is also the reward in training, is the share of 512 held-out
tasks with a right answer. Seconds are of the whole command with its evaluations, on two CPU cores with other work.

"""


def seeds_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line per run of the conversations."""
    head = "\n| | seed | before | after | seconds |\n| --- | --- | --- | --- | --- |\n"
    titles = {**CONVERSATIONS, **CONVERSATION_CONTROL}

    def ends(result: Mapping[str, Any]) -> str:
        return " | ".join(f"{e['true_score']:.3f} ± {e['half_width']:.3f}" for e in _ends(result))

    return head + "".join(
        f"| {titles[result['algorithm']]} | {result['seed']} | {ends(result)} | {result['last_invocation_seconds']} |\n"
        for result in results
    )


def _ends(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The first and the last evaluation of a run."""
    return [result["evaluations"][0], result["evaluations"][-1]]


def report() -> None:
    """Writes the page and its picture from the results that are there."""
    results = {(name, age): _results(name, age) for name, age in ROWS}
    done = {row: own for row, own in results.items() if own}
    summaries = {row: summed_up(ROWS[row], own) for row, own in done.items()}
    draw(done)
    missing = [
        f"{title} (seeds {', '.join(map(str, seeds))})"
        for row, title in ROWS.items()
        if (seeds := sorted(set(SEEDS) - {result["seed"] for result in results[row]}))
    ]
    still = f"\nNot run yet: {', '.join(missing)}.\n" if missing else ""
    controls = {**CONTROL, **CONVERSATION_CONTROL}
    judged = [s for (name, _), s in summaries.items() if name not in controls]
    failed = [s.name for s in judged if s.seeds == len(SEEDS) and not s.learns]
    verdict = f"\nNot beyond the margin: {', '.join(failed)}.\n" if failed else ""
    kinds = ({**ALGORITHMS, **CONTROL}, STALE, {**CONVERSATIONS, **CONVERSATION_CONTROL})
    tables = [table([s for (name, _), s in summaries.items() if name in kind]) for kind in kinds]
    seeds = seeds_table([result for (name, _), own in done.items() if name in kinds[2] for result in own])
    parts = (INTRODUCTION, tables[0], STALE_SAMPLES, tables[1], CONVERSATION_ROWS, tables[2], seeds, verdict, still)
    PAGE.write_text("".join(parts), encoding="utf-8")
    print(f"{PAGE} and {PICTURE} have {sum(map(len, done.values()))} of {len(CELLS)} cells")


def _results(algorithm: str, staleness: int | None) -> list[dict[str, Any]]:
    cells = (Cell(algorithm=algorithm, seed=seed, staleness=staleness) for seed in SEEDS)
    return [result for cell in cells if (result := cell.read()) is not None]


def draw(results: Mapping[Row, Sequence[Mapping[str, Any]]]) -> None:
    """One panel per algorithm: a line per seed, or per age of the samples the mean of the seeds; its control in all."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5), layout="constrained")
    panels = figure.subplots(2, 6, sharex=True, sharey=True)
    titles = {**ALGORITHMS, **STALE, **CONVERSATIONS}
    for axes in panels.flat[len(titles) :]:
        axes.set_visible(False)
    for axes, (name, title) in zip(panels.flat, titles.items(), strict=False):
        controls = CONVERSATION_CONTROL if name in CONVERSATIONS else CONTROL
        for (algorithm, age), own in results.items():
            if algorithm in controls:
                _line(axes, own, "shuffled rewards", color="0.5", linestyle="--")
            elif algorithm == name:
                lines = {f"{age} old": own} if name in STALE else {f"seed {result['seed']}": [result] for result in own}
                for label, averaged in lines.items():
                    _line(axes, averaged, label, marker=".")
        axes.set(title=title, ylim=(0, 1))
        axes.grid(alpha=0.2)
        if axes.lines and name in ("ppo", *STALE, *CONVERSATIONS):
            axes.legend(fontsize="x-small", ncols=2 if name in STALE else 1)
    figure.supxlabel("step", fontsize="medium")
    figure.supylabel("true score on held-out prompts, with 95% intervals", fontsize="medium")
    with rc_context({"svg.hashsalt": "learning"}):
        figure.savefig(PICTURE, metadata={"Date": None})


def _line(axes: Axes, averaged: Sequence[Mapping[str, Any]], label: str, **style: str) -> None:
    """The mean of the runs' true scores by step, and its 95% interval."""
    evaluations = list(zip(*(result["evaluations"] for result in averaged), strict=True))
    steps = [runs[0]["step"] for runs in evaluations]
    means = [statistics.fmean(run["true_score"] for run in runs) for runs in evaluations]
    widths = [math.hypot(*(run["half_width"] for run in runs)) / len(runs) for runs in evaluations]
    (line,) = axes.plot(steps, means, linewidth=1, label=label, **style)
    bounds = [[mean + sign * width for mean, width in zip(means, widths, strict=True)] for sign in (-1, 1)]
    axes.fill_between(steps, *bounds, color=line.get_color(), alpha=0.15, linewidth=0)


if __name__ == "__main__":
    main(sys.argv[1:])
