"""Training of the cells, and of the models and the data that they start from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.learning.cells import CONFIGS, CONVERSATIONS, CURRICULA, DISTILLED, FINE_TUNED, PREFERENCES, Cell
from examples.lookup.prepare import prepare
from examples.sort_letters.checkpoint import write_checkpoint
from examples.sort_letters.data import write_data
from examples.sort_letters.results import TRUE_SCORE, read_lines
from megarl.run.paths import field_at, read_config

DIRECTORY: Final = Path("runs/learning")
MIXED_PROMPTS: Final = 288
SHARED_SEED: Final = 0
"""Of the data and of the models that all cells start from."""


def work(cell: Cell) -> None:
    """Makes a cell's result; an interrupted run of the same settings goes on."""
    converses = cell.algorithm in CONVERSATIONS
    if converses:
        share_conversations()
    elif cell.algorithm in CURRICULA:
        share_mixed()
    elif cell.algorithm in PREFERENCES or cell.algorithm in FINE_TUNED:
        share("sft")
    else:
        share()
    if cell.algorithm in DISTILLED:
        share_teacher()
    elif cell.algorithm == "kto":
        share_rated()
    elif cell.algorithm in FINE_TUNED:
        share_right_answers()
    directory = DIRECTORY / "cells" / cell.name
    marker, run_dir = directory / "settings", directory / "run"
    if marker.exists() and marker.read_text(encoding="utf-8") != cell.settings():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    marker.write_text(cell.settings(), encoding="utf-8")
    start = time.perf_counter()
    train(cell.config, f"run.dir={run_dir}", f"run.seed={cell.seed}", *cell.overrides)
    if cell.algorithm in PREFERENCES or cell.algorithm in FINE_TUNED:
        outcome = measured_on_rows(directory, cell.seed)
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


def share_rated() -> None:
    """Makes of each pair two responses, one desirable and one not, where they are not there."""
    data = DIRECTORY / "data"
    for split in ("train", "held_out"):
        file = data / f"rated_{split}.jsonl"
        if file.exists():
            continue
        rows: list[str] = []
        for pair in read_lines(data / f"pairs_{split}.jsonl"):
            for response, label in ((pair["chosen"], True), (pair["rejected"], False)):
                row = {"prompt": pair["prompt"], "response": response, "label": label}
                rows.append(json.dumps(row) + "\n")
        file.write_text("".join(rows), encoding="utf-8")


def share_right_answers() -> None:
    """Makes demonstrations that are all right, where they are not there."""
    file = DIRECTORY / "data" / "right_train.jsonl"
    if file.exists():
        return
    rows: list[str] = []
    for pair in read_lines(DIRECTORY / "data" / "pairs_train.jsonl"):
        rows.append(json.dumps({"prompt": pair["prompt"], "response": pair["chosen"]}) + "\n")
    file.write_text("".join(rows), encoding="utf-8")


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


def measured_on_rows(directory: Path, seed: int) -> dict[str, Any]:
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
    config = read_config(run_dir / "config.yaml")
    if config["stage"] == "sft":
        samples = len(steps) * field_at(config, "data.sequences_per_step")
    else:
        samples = len(steps) * field_at(config, "data.pairs_per_step")
        if field_at(config, "preference.loss.name") != "kto":  # whose responses are single
            samples *= 2
    return {
        "verdict": summary["verdict"],
        "findings": summary.get("findings", []),
        "evaluations": evaluations,
        "steps": len(steps),
        "samples": samples,
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
