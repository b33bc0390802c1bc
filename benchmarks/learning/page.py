"""The page of the learning benchmark and its picture, from the results that are there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.learning.cells import (
    ADAPTED,
    ALGORITHMS,
    CELLS,
    CONTROLS,
    CONVERSATIONS,
    CURRICULA,
    DISTILLED,
    FINE_TUNED,
    PREFERENCES,
    ROWS,
    SEEDS,
    STALE,
    Cell,
    Row,
)
from benchmarks.learning.training import SHARED_SEED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE: Final = Path("docs/learning.md")
PICTURE: Final = Path("docs/learning.svg")
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
20,000 pairs from which its reward model was trained: each a right answer, and one with a mistake. KTO gets them as
single responses, desirable or not. Samples are responses, and there is no reward model. True scores are those of stage
`eval` on the same prompts.

"""
ADAPTED_ROWS: Final = """
## With adapters

[Adapters](lora.md) of all linear layers in place of the weights, with alpha 32 and ten times the learning rate: GRPO as
in the first table, and supervised fine-tuning of the same fine-tuned model on 6,400 right answers.

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
    checks = "[health checks](metrics.md#health-checks)"
    found = f":\n\n{''.join(lines)}" if lines else " nothing.\n"
    return f"\nIn the {len(kept)} runs, controls apart, whose findings were kept, the {checks} found{found}"


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
        ADAPTED_ROWS,
        table(done, ("grpo", *ADAPTED, *FINE_TUNED)),
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
