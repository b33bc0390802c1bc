"""What every algorithm makes of the demo's task, and GRPO of one of several turns: three seeds of one fine-tuned model.

    python -m benchmarks.learning                              what is done and what is missing
    python -m benchmarks.learning --algorithm grpo --seed 0    one cell
    python -m benchmarks.learning --algorithm decoupled_ppo --staleness 2 --seed 0
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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from examples.lookup.prepare import prepare
from examples.sort_letters.checkpoint import write_checkpoint
from examples.sort_letters.data import write_data
from examples.sort_letters.results import TRUE_SCORE, read_lines
from megarl.config.inheritance import merged
from megarl.run.paths import field_at, read_config

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
    "control": "GRPO, shuffled rewards",
}
"""By the names of their files."""
STALE: Final = {"decoupled_ppo": "decoupled PPO", "coupled_ppo": "coupled PPO"}
"""Those on samples of older weights, likewise."""
CONVERSATIONS: Final = {"lookup": "GRPO over several turns", "lookup_control": "the same, shuffled rewards"}
"""Those on a task of several turns, likewise."""
PREFERENCES: Final = {"dpo": "DPO", "ipo": "IPO", "simpo": "SimPO", "orpo": "ORPO"}
"""Those on preferences, likewise."""
DISTILLED: Final = {"opd": "sampled tokens", "opd_full": "whole distributions"}
"""Those that learn from a teacher, likewise."""
CURRICULA: Final = {
    "uniform": "epochs",
    "dynamic": "epochs, dynamic sampling",
    "pools": "pools",
    "learnability": "learnability",
    "thompson": "Thompson sampling",
}
"""Those on prompts of which a third is always solved and a third never, likewise."""
MIXED_PROMPTS: Final = 288
CONTROLS: Final = ("control", "lookup_control")
"""What must not learn."""
STALENESS: Final = (0, 1, 2, 4, 8)
"""How many versions old these samples are."""
Row = tuple[str, int | None]
"""An algorithm, and the age of its samples."""
ROWS: Final[Mapping[Row, str]] = {
    **{(name, None): title for name, title in {**ALGORITHMS, **CONVERSATIONS, **PREFERENCES, **DISTILLED}.items()},
    **{(name, None): title for name, title in CURRICULA.items()},
    **{(name, age): f"{title}, {age} old" for name, title in STALE.items() for age in STALENESS},
}
"""Titles of the rows of the tables."""
SEEDS: Final = (0, 1, 2)
SHARED_SEED: Final = 0
"""Of the data and of the models that all cells start from."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One algorithm with one seed; its samples are `staleness` versions old."""

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
    def result(self) -> Path:
        return RESULTS / f"{self.name}.json"

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=sorted({name for name, _ in ROWS}))
    parser.add_argument("--staleness", type=int, choices=STALENESS, help="of decoupled_ppo and coupled_ppo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="all that are missing, one after the other")
    parser.add_argument("--report", action="store_true", help="write the page and its picture")
    options = parser.parse_args(arguments)
    if (options.algorithm in STALE) == (options.staleness is None):
        parser.error(f"--staleness belongs to {' and '.join(STALE)}, which need it")
    if options.report:
        report()
    elif options.algorithm is not None:
        work(Cell(algorithm=options.algorithm, seed=options.seed, staleness=options.staleness))
    else:
        for cell in CELLS:
            missing = cell.read() is None
            if options.all and missing:
                work(cell)
            elif not options.all:
                print(f"{cell.name:20} {'missing' if missing else 'done'}")


# ---- running


def work(cell: Cell) -> None:
    """Makes a cell's result; an interrupted run of the same settings goes on."""
    converses = cell.algorithm in CONVERSATIONS
    if converses:
        share_conversations()
    elif cell.algorithm in CURRICULA:
        share_mixed()
    else:
        share()
    if cell.algorithm in DISTILLED:
        share_teacher()
    directory = DIRECTORY / "cells" / cell.name
    marker, run_dir = directory / "settings", directory / "run"
    if marker.exists() and marker.read_text(encoding="utf-8") != cell.settings():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    marker.write_text(cell.settings(), encoding="utf-8")
    start = time.perf_counter()
    train(cell.config, f"run.dir={run_dir}", f"run.seed={cell.seed}", *cell.overrides)
    if cell.algorithm in PREFERENCES:
        outcome = measured_on_preferences(directory, cell.seed)
    else:
        outcome = measured(run_dir, "environment" if converses else TRUE_SCORE)
    result = {
        "algorithm": cell.algorithm,
        "seed": cell.seed,
        **({} if cell.staleness is None else {"staleness": cell.staleness}),
        "settings": cell.settings(),
        "last_invocation_seconds": round(time.perf_counter() - start),
        **outcome,
    }
    cell.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{cell.result}: {result['verdict']}")


def share(*stages: str) -> None:
    """Makes the data, the fine-tuned model and the reward model, or some stages of them, where they are not there."""
    if not (DIRECTORY / "data").exists():
        write_checkpoint(DIRECTORY / "model", SHARED_SEED)
        write_data(DIRECTORY / "made", SHARED_SEED)
        (DIRECTORY / "made").rename(DIRECTORY / "data")
    for stage, start, kind in (("sft", "model", "demonstrations"), ("reward_model", "sft/export", "pairs")):
        if stages and stage not in stages:
            continue
        paths = {"model.path": start, "data.train": f"data/{kind}_train.jsonl"}
        paths["data.evaluation"] = f"data/{kind}_held_out.jsonl"
        if stage == "reward_model":
            paths["normalisation.prompts"] = "data/prompts_train.jsonl"
        train_shared(Path("configs/demo") / f"{stage}.yaml", DIRECTORY / stage, paths, "checkpoint.every=100")


def share_teacher() -> None:
    """Makes the teacher, which is the fine-tuned model after GRPO, where it is not there."""
    if not (DIRECTORY / "teacher" / "export").exists():
        train(CONFIGS / "grpo.yaml", f"run.dir={DIRECTORY / 'teacher'}", f"run.seed={SHARED_SEED}")


def share_mixed() -> None:
    """Makes the fine-tuned model, and prompts of three kinds, where they are not there."""
    share("sft")
    file = DIRECTORY / "mixed" / "prompts.jsonl"
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    for index, row in enumerate(read_lines(DIRECTORY / "data" / "prompts_train.jsonl")[:MIXED_PROMPTS]):
        kind = ("solvable", "trivial", "unsolvable")[index % 3]
        rows.append(json.dumps({**row, "kind": kind}) + "\n")
    file.write_text("".join(rows), encoding="utf-8")


def share_conversations() -> None:
    """Makes the fine-tuned model of the task of several turns, where it is not there."""
    run_dir = DIRECTORY / "lookup" / "sft"
    if not run_dir.exists():
        prepare(run_dir.parent, SHARED_SEED)
    paths = {"model.path": "model", "data.train": "demonstrations.jsonl"}
    train_shared(Path("examples/lookup/sft.yaml"), run_dir, paths)


def train_shared(config: Path, run_dir: Path, paths: Mapping[str, str], *overrides: str) -> None:
    """`megarl train` of a model that several cells start from, unless it is there; `paths` are beside its directory."""
    if not (run_dir / "export").exists():
        fields = {"run.dir": run_dir, **{field: run_dir.parent / path for field, path in paths.items()}}
        set_fields = (f"{field}={value}" for field, value in fields.items())
        train(config, *set_fields, f"run.seed={SHARED_SEED}", *overrides)


def train(config: Path, *overrides: str) -> None:
    """`megarl train` to its end; where it fails, it has said why, and this ends too."""
    megarl("train", config, *overrides)


def megarl(command: str, config: Path, *overrides: str) -> None:
    status = subprocess.run([sys.executable, "-m", "megarl", command, str(config), *overrides], check=False).returncode
    if status:
        sys.exit(status)


def measured_on_preferences(directory: Path, seed: int) -> dict[str, Any]:
    """What a run in `directory` came to: true scores of the model before and after, samples being responses."""
    run_dir = directory / "run"
    steps = read_lines(run_dir / "metrics.jsonl")
    evaluations: list[dict[str, Any]] = []
    for step, model in ((0, DIRECTORY / "sft" / "export"), (len(steps), run_dir / "export")):
        evaluated = directory / f"true_score-{step}"
        if not (evaluated / "summary.json").exists():
            megarl("eval", CONFIGS / "eval.yaml", f"run.dir={evaluated}", f"model.path={model}", f"run.seed={seed}")
        (row,) = read_lines(evaluated / "evaluations.jsonl")
        evaluations.append(
            {
                "step": step,
                "samples": row["eval/samples"],
                "true_score": round(row[f"eval/{TRUE_SCORE}"], 4),
                "half_width": round(row[f"eval/{TRUE_SCORE}_ci95"], 4),
            }
        )
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return {
        "verdict": summary["verdict"],
        "findings": summary.get("findings", []),
        "evaluations": evaluations,
        "steps": len(steps),
        "samples": 2 * len(steps) * field_at(read_config(run_dir / "config.yaml"), "data.pairs_per_step"),
        "seconds_in_steps": round(sum(row["time/step"] for row in steps)),
        "kl": [],
    }


def measured(run_dir: Path, true_score: str) -> dict[str, Any]:
    """What a run came to: evaluations, verdict, findings, and by step the score in training and the divergence."""
    steps = read_lines(run_dir / "metrics.jsonl")
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return {
        "verdict": summary["verdict"],
        "findings": summary.get("findings", []),
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
        **_generated(steps, run_dir),
        "seconds_in_steps": round(sum(row["time/step"] for row in steps)),
        "score": [round(row["objective/score"], 4) for row in steps if "objective/score" in row],
        "kl": [round(row["objective/kl"], 4) for row in steps if "objective/kl" in row],
    }


def _generated(steps: Sequence[Mapping[str, Any]], run_dir: Path) -> dict[str, int]:
    """The samples of dynamic sampling, with those that were rejected; nothing of other runs."""
    prompts = sum(row.get("filter/groups", 0) for row in steps)
    if not prompts:
        return {}
    return {"generated": prompts * field_at(read_config(run_dir / "config.yaml"), "data.samples_per_prompt")}


# ---- the page


Results = Sequence[Mapping[str, Any]]
"""Of the seeds of a row, or of several rows."""


def learns(results: Results) -> bool:
    """Every seed gains, and the mean gain is beyond the spread of the seeds and the error of an evaluation."""
    starts, ends = true_scores(results)
    half_width = max(result["evaluations"][-1]["half_width"] for result in results)
    gains = [end - start for start, end in zip(starts, ends, strict=True)]
    return min(gains) > 0 and statistics.fmean(gains) > max(max(ends) - min(ends), 2 * half_width)


def true_scores(results: Results) -> tuple[list[float], list[float]]:
    """Those of the first and of the last evaluations."""
    starts, ends = ([result["evaluations"][which]["true_score"] for result in results] for which in (0, -1))
    return starts, ends


def table(rows: Mapping[Row, Results], names: Collection[str]) -> str:
    """Markdown: a line per row of some algorithms."""
    head = "| algorithm | seeds | steps | samples | start | end | gain | spread of the ends | KL | learns |\n"
    rule = "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    return head + rule + "".join(_row(ROWS[row], results) for row, results in rows.items() if row[0] in names)


def _row(title: str, results: Results) -> str:
    starts, ends = true_scores(results)
    start, end = statistics.fmean(starts), statistics.fmean(ends)
    spread = "-" if len(ends) == 1 else f"{max(ends) - min(ends):.3f}"
    measured = [result["kl"][-1] for result in results if result["kl"]]
    kl = f"{statistics.fmean(measured):.2f}" if measured else "-"
    verdict = "open" if len(results) < len(SEEDS) else "yes" if learns(results) else "**no**"
    numbers = f"{start:.3f} | {end:.3f} | {end - start:+.3f} | {spread} | {kl} | {verdict}"
    samples = round(statistics.fmean(result.get("generated", result["samples"]) for result in results))
    return f"| {title} | {len(results)} | {results[0]['steps']} | {samples:,} | {numbers} |\n"


INTRODUCTION: Final = """# Does it learn?

Written by `python -m benchmarks.learning --report` from the results in
[benchmarks/results/learning](../benchmarks/results/learning); do not edit it.

Every algorithm trains on the [demo's](quickstart.md#the-demo) task: sort letters, where the answer to `up kdxbq:` is
`bdkqx`. All
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
CURRICULUM_ROWS: Final = """
## Curricula

GRPO on a rule, the true score itself, of 288 [prompts](data.md#order): to a third any answer is right, and to a third
none, so that they teach nothing. All rows have about the same number of generated samples. Dynamic sampling generates
the samples of further prompts until a step is full of prompts whose samples differ, and has fewer steps. A curriculum
knows nothing of a prompt before its first draw; in epochs, 18 of the 48 steps have drawn each once.

"""
PREFERENCE_ROWS: Final = """
## On preferences

[Direct preference optimization](stages.md#direct-preference-optimization-dpo) of the same fine-tuned model, on the
20,000 pairs from which its reward model was trained: each a right answer, and one with a mistake. Samples are
responses, and there is no reward model. True scores are those of stage `eval` on the same prompts.

"""
DISTILLED_ROWS: Final = """
## From a teacher

[On-policy distillation](stages.md#on-policy-distillation) of the same fine-tuned model, whose teacher is the model that
GRPO made of it with seed 0. Nothing scores the samples. KL is the divergence from the teacher.

"""


def seeds_table(results: Results) -> str:
    """Markdown: a line per run of the conversations."""
    lines = ["\n| | seed | before | after | seconds |\n| --- | --- | --- | --- | --- |\n"]
    for result in results:
        first, *_, last = (f"{each['true_score']:.3f} ± {each['half_width']:.3f}" for each in result["evaluations"])
        title, seconds = CONVERSATIONS[result["algorithm"]], result["last_invocation_seconds"]
        lines.append(f"| {title} | {result['seed']} | {first} | {last} | {seconds} |\n")
    return "".join(lines)


def _teachers_share(rows: Mapping[Row, Results]) -> str:
    """Says after how many samples a row has 0.9 of the teacher's true score, in the mean of its seeds."""
    if not rows.get(("grpo", None)):
        return ""
    teacher = rows["grpo", None][SHARED_SEED]
    score = teacher["evaluations"][-1]["true_score"]
    texts = [f"The teacher has {score:.3f}, after {teacher['samples']:,} samples."]
    for name, title in DISTILLED.items():
        results = rows.get((name, None), ())
        for runs in zip(*(result["evaluations"] for result in results), strict=True):
            if statistics.fmean(run["true_score"] for run in runs) >= 0.9 * score:
                samples = runs[0]["step"] * results[0]["samples"] // results[0]["steps"]
                texts.append(f"With {title} 0.9 of that is reached after {samples:,}.")
                break
    return f"\n{' '.join(texts)}\n"


def findings(results: Mapping[Cell, Mapping[str, Any]]) -> str:
    """Markdown: what the health checks found in the runs that must learn; older results have not kept it."""
    kept = [cell for cell in results if "findings" in results[cell] and cell.algorithm not in CONTROLS]
    lines = [f"- `{cell.name}`, step {f['first']}: {f['text']}\n" for cell in kept for f in results[cell]["findings"]]
    found = f":\n\n{''.join(lines)}" if lines else " nothing.\n"
    return f"\nIn {len(kept)} of the runs, controls apart, the [health checks](metrics.md#health-checks) found{found}"


def report() -> None:
    """Writes the page and its picture from the results that are there."""
    read = {cell: result for cell in CELLS if (result := cell.read()) is not None}
    own = {row: [result for cell, result in read.items() if (cell.algorithm, cell.staleness) == row] for row in ROWS}
    done = {row: results for row, results in own.items() if results}
    missing = [f"`{cell.name}`" for cell in CELLS if cell not in read]
    draw(done)
    judged = {row: seeds for row, seeds in done.items() if row[0] not in CONTROLS and len(seeds) == len(SEEDS)}
    failed = [ROWS[row] for row, seeds in judged.items() if not learns(seeds)]
    parts = (
        INTRODUCTION,
        table(done, ALGORITHMS),
        STALE_SAMPLES,
        table(done, STALE),
        CURRICULUM_ROWS,
        table(done, CURRICULA),
        DISTILLED_ROWS,
        table(done, DISTILLED),
        _teachers_share(done),
        PREFERENCE_ROWS,
        table(done, PREFERENCES),
        CONVERSATION_ROWS,
        table(done, CONVERSATIONS),
        seeds_table([result for (name, _), seeds in done.items() if name in CONVERSATIONS for result in seeds]),
        f"\nNot beyond the margin: {', '.join(failed)}.\n" if failed else "",
        findings(read),
        f"\nNot run yet: {', '.join(missing)}.\n" if missing else "",
    )
    PAGE.write_text("".join(parts), encoding="utf-8")
    print(f"{PAGE} and {PICTURE} have {len(read)} of {len(CELLS)} cells")


def draw(results: Mapping[Row, Results]) -> None:
    """One panel per algorithm: a line per seed, or per age of the samples the mean of the seeds; its control in all."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5), layout="constrained")
    panels = figure.subplots(2, 6, sharex=True, sharey=True)
    every = {**ALGORITHMS, **STALE, **CONVERSATIONS}
    titles = {name: title for name, title in every.items() if name not in CONTROLS}
    for axes in panels.flat[len(titles) :]:
        axes.set_visible(False)
    for axes, (name, title) in zip(panels.flat, titles.items(), strict=False):
        control = "lookup_control" if name in CONVERSATIONS else "control"
        for (algorithm, age), own in results.items():
            if algorithm == control:
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


def _line(axes: Axes, averaged: Results, label: str, **style: str) -> None:
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
