"""Every benchmark runs, at a size that says nothing about speed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import kept_sets
from benchmarks.asynchronous import LOADS, SETTINGS, SYNCHRONOUS
from benchmarks.learning import __main__ as learning
from benchmarks.learning import cells, training
from examples.sort_letters.checkpoint import tokenizer
from megarl.config import load

REPOSITORY = Path(__file__).parents[1]
TINY = "{vocab_size: 128, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, "
SMOKE: Mapping[str, Sequence[str]] = {
    "adapters": ["--rounds", "1", "--steps", "2", "--hidden", "64", "--layers", "1", "--rank", "2"],
    "config_load": ["--runs", "1"],
    "convert": ["--layers", "1", "--vocab-size", "1000"],
    "debug_run": ["configs/debug/grpo.yaml", "run.steps=2", "evaluation=null"],
    "drafts": ["--tokens", "8", "--layers", "1", "--rounds", "1"],
    "experts": ["--rounds", "1", "--largest", "8"],
    "gateway": ["--sessions", "2", "--turns", "5"],
    "packed_attention": ["--rounds", "1"],
    "plan": ["--rollout", "tp=8,replicas=1"],
    "reshard": ["--layers", "2", "--repetitions", "1"],
    "turns": ["--conversations", "4", "--turns", "2"],
    "save": [f"model.random.config={TINY}num_key_value_heads: 2}}"],
}
"""Arguments of those that `make bench` runs."""
WITHOUT_MODEL = ("config_load", "gateway", "plan", "turns")
"""Those that start no trainer and no engine; `make matrix` has the others."""
LONG = ("asynchronous", "certificates", "compare_runs", "gpu", "kept_sets", "learning")
"""Those with a test of their own; that of the package `gpu` is tests/test_gpu_benchmark.py."""


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_benchmark_runs_here() -> None:
    files = (REPOSITORY / "benchmarks").glob("*.py")
    packages = (file.parent for file in (REPOSITORY / "benchmarks").glob("*/__main__.py"))
    assert {path.stem for path in (*files, *packages)} == {*SMOKE, *LONG}


@pytest.mark.process
def test_make_bench_runs_all_others() -> None:
    listed = subprocess.run(["make", "-n", "bench"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"-m benchmarks\.(\w+)", listed)) == SMOKE.keys()


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in WITHOUT_MODEL else pytest.mark.matrix) for name in SMOKE]
)
def test_a_benchmark_measures(name: str) -> None:
    assert re.search(r"\d", run(name, *SMOKE[name]))


# ---- asynchronous


@pytest.mark.parametrize("name", LOADS)
def test_every_way_of_training_is_valid(name: str, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps(SETTINGS))
    shared = [f"run={{dir: {tmp_path}/run, steps: 16}}", *LOADS[name].overrides]
    if LOADS[name].talks:
        shared.append(f"model.tokenizer={tmp_path}")
    modes = [load(tmp_path / "run.yaml", [*shared, *way]).rollout.mode for way in ((), *LOADS[name].ways.values())]
    assert len(modes) == len(LOADS[name].ways) + 1


@pytest.mark.e2e
@pytest.mark.matrix
def test_asynchronous_training_is_compared() -> None:
    short = "rollout.max_new_tokens=8"
    table = run("asynchronous", "--load", "even", "--steps", "4", short)
    assert re.search(rf"^even +{SYNCHRONOUS} .* 1\.00$", table, flags=re.MULTILINE), table
    assert re.search(r"^even +exact, 1 .*%", table, flags=re.MULTILINE), table


# ---- compare_runs


@pytest.mark.e2e
@pytest.mark.matrix
def test_a_commit_equals_itself_and_differs_from_a_changed_one(tmp_path: Path) -> None:
    records = [tmp_path / name for name in ("one.json", "other.json")]
    run("compare_runs", "record", str(records[0]), "--only", "plan/sft", "debug/sft/configured")
    record = json.loads(records[0].read_text())
    assert record.keys() == {"plan/sft", "debug/sft/configured"}
    assert [name for name in record["debug/sft/configured"] if name.startswith("checkpoints/")]
    records[1].write_text(json.dumps(record))
    assert "0 of 2 parts differ" in run("compare_runs", "compare", *map(str, records))
    record["plan/sft"] += "more\n"
    records[1].write_text(json.dumps(record))
    command = [sys.executable, "-m", "benchmarks.compare_runs", "compare", *map(str, records)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "1 of 2 parts differ")


# ---- learning


@pytest.mark.e2e
@pytest.mark.matrix
def test_a_cell_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("configs", "examples"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    (tmp_path / cells.RESULTS).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    train = training.train

    def train_shortly(config: Path, *overrides: str) -> None:
        few = ["data.prompts_per_step=2", "evaluation.tasks=16"] if config.stem == "lookup" else []
        train(config, *overrides, "run.steps=2", *few)

    monkeypatch.setattr(training, "train", train_shortly)
    learning.main(["--algorithm", "lookup", "--seed", "0"])
    result = json.loads((tmp_path / cells.RESULTS / "lookup-0.json").read_text())
    assert (result["steps"], [row["step"] for row in result["evaluations"]]) == (2, [0, 2])


def test_ratios_of_all_tokens_by_hand(tmp_path: Path) -> None:
    """Of a model by which all 8 tokens are alike, of which half were kept; another step's samples do not count."""

    class Uniform:
        def __call__(self, *, input_ids: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=torch.zeros(1, input_ids.shape[1], 8))

    for name in ("1%2Fa%2F0", "2%2Fa%2F0"):
        columns = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "rollout_logprobs": [math.log(1 / 4)] * 3}
        np.savez(tmp_path / f"{name}.npz", **{key: np.array(values) for key, values in columns.items()})
    (ratios,) = kept_sets.ratios_of_all_tokens(Uniform(), tmp_path)
    assert ratios == pytest.approx([0.5] * 3)
