"""Whether two commits compute the same, bit for bit: records what a checkout does, and compares two records.

    python -m benchmarks.compare_runs                                               the names of the parts
    python -m benchmarks.compare_runs record OUT.json [--checkout DIR] [--only NAME ...]
    python -m benchmarks.compare_runs compare A.json B.json [--only NAME ...] [--ignore REGEX ...]

A record has the debug runs of every stage in three layouts, two steps of the demo's stages and of every recipe, the
vectors of tests/algos, what `megarl plan` prints, the options of every command, and all configurations. A run is
recorded by its files: metrics, updates, evaluations, samples, rollouts, weights, checkpoints, summary, configuration.
Values that depend on the clock are left out. `--only debug/ppo` takes the parts whose names begin so; a record that
exists keeps its other parts. `--ignore` leaves out values by their place, as the comparison prints it.

Records are comparable on one machine with one set of libraries. Of a checkout, commands and files alone are used, so
that it may be any commit; it needs an environment in `.venv`. A whole record takes 20 minutes of two idle cores.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

LIMIT_S: Final = 900
TIMED: Final = re.compile(
    r"(time|perf|memory)/.*|sync/(.*seconds|gb_per_second)|rollout/engine_idle"
    r"|time|seconds|plan_seconds|host|pid|job|peak_memory_gb|sha256|nbytes"
)
"""Keys whose values differ from run to run; a checkpoint is compared by its tensors, not by its files."""
IDENTITY: Final = ("event", "number", "step", "update", "kind", "sample_id")
"""Keys that tell the lines of a file apart."""
ABSENT: Final = "(absent)"
LARGE: Final = 50_000
"""Bytes from which on a JSON file is recorded by its digest."""


def layout(*overrides: str, **roles: tuple[int, int]) -> Sequence[str]:
    """Overrides that give roles a TP and a PP size."""
    return [*(f"groups.train.roles.{role}={{tp: {tp}, pp: {pp}}}" for role, (tp, pp) in roles.items()), *overrides]


LAYOUTS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "sft": {"configured": [], "tp1-pp1": layout(actor=(1, 1)), "pp2": layout(actor=(1, 2))},
    "reward_model": {"configured": [], "tp1-pp1": layout(reward=(1, 1)), "pp2": layout(reward=(1, 2))},
    "ppo": {
        "configured": [],
        "tp1-pp1": layout(actor=(1, 1), critic=(1, 1), reference=(1, 1), reward=(1, 1)),
        "tp2-engine-tp2": layout(
            "rollout={devices: 0-1, tp: 2}", actor=(2, 1), critic=(2, 1), reference=(1, 2), reward=(2, 1)
        ),
        "further-parts": [
            "algo={filter: nonzero_std, early_stop: {kl: 10}, kl: {target: 6}}",
            "algo.correction.weights={name: token_mask, upper: 5}",
            "critic.value_norm={}",
            "actor.ema.decay=0.9",
            "ptx={data: configs/debug/data/demonstrations.jsonl, max_tokens: 64, sequences_per_mini_batch: 3, coef: 1}",
        ],
    },
    "grpo": {"configured": [], "tp1-pp1": layout(actor=(1, 1)), "pp2": layout(actor=(1, 2), reference=(2, 1))},
    "raft": {"configured": [], "tp1-pp1": layout(actor=(1, 1)), "tp2": layout(actor=(2, 1), reward=(1, 2))},
    "eval": {
        "configured": [],
        "engine-tp2": ["rollout={devices: 0-1, tp: 2}"],
        "reward-tp2": ["groups.judge={devices: 1-2, roles: {reward: {tp: 2, tokens_per_micro_batch: 128}}}"],
    },
}
"""Of the debug runs: overrides by stage and name."""

VECTORS: Final = """
import json, torch
from tests.algos.vector_adapter import UnsupportedError, run
found = {}
for case in json.load(open("tests/algos/vectors.json"))["cases"]:
    for dtype in (torch.float64, torch.float32):
        try:
            outputs = run(case, dtype)
        except UnsupportedError:
            outputs = "unsupported"
        found[f"{case['fn']} {case['id']} {dtype}"] = outputs
print(json.dumps(found))
"""

RECIPE: Final = """
run: {dir: run, steps: 2, seed: 1}
rollout: {devices: 1, max_new_tokens: 32, max_model_len: 64, kv_cache_mib: 64, record: run/rollouts}
data: {random: {count: 64, min_tokens: 4, max_tokens: 16}, prompts_per_step: 40}
actor: {optimizer: {lr: 1.0e-3}}
tracking: {samples: 100}
"""
"""Of the run of a recipe: what all have."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    recording, comparing = commands.add_parser("record"), commands.add_parser("compare")
    recording.add_argument("out", type=Path)
    recording.add_argument("--checkout", type=Path, default=Path(), help="the one to record; this directory")
    comparing.add_argument("records", type=Path, nargs=2)
    comparing.add_argument("--ignore", nargs="+", default=[], help="values whose names match are not compared")
    for command in (recording, comparing):
        command.add_argument("--only", nargs="+", default=[""], help="parts whose names begin so")
    options = parser.parse_args(arguments)
    if options.command == "record":
        return record(options.out, options.checkout.resolve(), tuple(options.only))
    if options.command == "compare":
        one, other = options.records
        return compare(one, other, tuple(options.only), options.ignore)
    print(*parts(Path()), sep="\n")
    return 0


# ---- recording


def parts(checkout: Path) -> dict[str, Callable[..., Any]]:
    """What is recorded, by name: each a function of the checkout and of a directory to work in."""
    return {
        "vectors": vectors,
        "configs": configurations,
        "options": options_of,
        **{f"plan/{stage}": partial(plan, stage) for stage in LAYOUTS},
        "plan/recipes": plan_recipes,
        "plan/weights": plan_weights,
        **{
            f"debug/{stage}/{name}": partial(debug, stage, LAYOUTS[stage][name])
            for stage in LAYOUTS
            for name in LAYOUTS[stage]
        },
        "demo": demo,
        "conversations/sync": partial(conversations, []),
        "conversations/exact": partial(conversations, ["rollout.mode=exact", "rollout.max_staleness=1"]),
        **{f"recipe/{name}": partial(recipe, name) for name in recipes(checkout)},
    }


def record(out: Path, checkout: Path, only: tuple[str, ...]) -> int:
    """Adds the parts to the file; 1 where a part failed, which is then missing."""
    found = json.loads(out.read_text()) if out.exists() else {}
    failed = 0
    for name, function in parts(checkout).items():
        if not name.startswith(only):
            continue
        start = time.perf_counter()
        found.pop(name, None)
        with tempfile.TemporaryDirectory(
            dir="/tmp", ignore_cleanup_errors=True
        ) as directory:  # short, for Ray's sockets
            for given in ("configs", "examples"):
                (Path(directory) / given).symlink_to(checkout / given)
            (Path(directory) / "tmp").mkdir()
            try:
                found[name] = function(checkout, Path(directory))
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(f"{name}: {error}\n{error.stdout or ''}\n{error.stderr or ''}", file=sys.stderr)
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name:35} {time.perf_counter() - start:5.0f} s{'' if name in found else '  FAILED'}", flush=True)
    return int(failed > 0)


def called(checkout: Path, directory: Path, *command: str, at: Path | None = None) -> str:
    """The output of a command of the checkout's environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MEGARL_"))}
    settings = {"PYTHONPATH": str(checkout), "TMPDIR": str(directory / "tmp"), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    program = [str(checkout / ".venv/bin" / command[0]), *command[1:]]
    return subprocess.run(
        program,
        cwd=at or directory,
        env={**kept, **settings},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    ).stdout


def vectors(checkout: Path, directory: Path) -> Any:
    """What the vectors' functions return."""
    return json.loads(called(checkout, directory, "python", "-c", VECTORS, at=checkout))


def configurations(checkout: Path, directory: Path) -> Any:
    """Every configuration as it stands in its file."""
    files = sorted((checkout / "configs").rglob("*.yaml"))
    return {str(file.relative_to(checkout)): yaml.safe_load(file.read_text()) for file in files}


def options_of(checkout: Path, directory: Path, *command: str) -> dict[str, Any]:
    """Arguments and options of a command and of its subcommands, without their descriptions."""
    text = called(checkout, directory, "megarl", *command, "--help")
    usage = re.search(r"Usage: (.*?) *\n", text)
    options = re.findall(r"^│ [ *]*(-[-\w]+(?: +-[-\w]+)*) +(\S+)", text, re.MULTILINE)
    own = {"usage": usage and usage[1], "options": {" ".join(names.split()): kind for names, kind in options}}
    found: dict[str, Any] = {" ".join(["megarl", *command]): own}
    listed = re.search(r"─ Commands ─(.*?)╰", text, re.DOTALL)
    for name in re.findall(r"^│ ([\w-]+)", listed[1] if listed else "", re.MULTILINE):
        found |= options_of(checkout, directory, *command, name)
    return found


def plan(stage: str, checkout: Path, directory: Path) -> Any:
    return called(checkout, directory, "megarl", "plan", f"configs/debug/{stage}.yaml", "run.dir=run")


def plan_recipes(checkout: Path, directory: Path) -> Any:
    """What is planned for the run of each recipe."""
    return {
        name: called(checkout, directory, "megarl", "plan", recipe_run(name, checkout, directory))
        for name in recipes(checkout)
    }


def plan_weights(checkout: Path, directory: Path) -> Any:
    """A transfer of the debug model's weights between two layouts."""
    model = yaml.safe_load((checkout / "configs/debug/base.yaml").read_text())["model"]["random"]["config"]
    (directory / "config.json").write_text(json.dumps(model))
    asked = "--hf config.json --train tp=2,pp=2,dp=2 --rollout tp=2,replicas=2 --bucket-mib 0.125 --json"
    return without_times(json.loads(called(checkout, directory, "megarl", "plan", "weights", *asked.split())))


def debug(stage: str, overrides: Sequence[str], checkout: Path, directory: Path) -> Any:
    """A debug run: three steps, and all of its rollouts."""
    own = ["run.dir=run", *overrides]
    if stage != "eval":
        own.append("run.steps=3")
    if stage in ("ppo", "grpo", "raft"):
        own += ["rollout.record=run/rollouts", "tracking.samples=100"]
    called(checkout, directory, "megarl", "eval" if stage == "eval" else "train", f"configs/debug/{stage}.yaml", *own)
    return described(directory / "run")


def demo(checkout: Path, directory: Path) -> Any:
    """The model, the data, and two steps of each stage from seed 0."""
    command = re.search(r"\$\(BIN\)/python (.+) --seed \$\(SEED\)", (checkout / "Makefile").read_text())
    assert command is not None, "the Makefile has no demo"
    called(checkout, directory, "python", *command[1].split(), "--seed", "0", "run.steps=2")
    return described(directory / "runs/demo")


def conversations(overrides: Sequence[str], checkout: Path, directory: Path) -> Any:
    """Three steps of conversations with a table, after enough demonstrations to ask it now and then."""
    called(checkout, directory, "python", "-m", "examples.lookup.prepare", ".")
    sft = ["examples/lookup/sft.yaml", "run.dir=sft", "run.steps=30", "model.path=model"]
    called(checkout, directory, "megarl", "train", *sft, "data.train=demonstrations.jsonl")
    given = ["run.dir=run", "run.steps=3", "model.path=sft/export", "rollout.record=run/rollouts", *overrides]
    called(checkout, directory, "megarl", "train", "examples/lookup/grpo.yaml", *given)
    return described(directory / "run")


def recipes(checkout: Path) -> Sequence[str]:
    return sorted(file.stem for file in (checkout / "configs/recipes").glob("*.yaml"))


def recipe(name: str, checkout: Path, directory: Path) -> Any:
    """Two steps of a recipe with the model of the debug runs."""
    called(checkout, directory, "megarl", "train", recipe_run(name, checkout, directory))
    return described(directory / "run")


def recipe_run(name: str, checkout: Path, directory: Path) -> str:
    """Writes what a run has beside its recipe: all roles on one device, few and short samples, a rate that shows."""
    own = yaml.safe_load((checkout / f"configs/recipes/{name}.yaml").read_text())
    roles = ["actor", *["critic"] * ("critic" in own), *["reference"] * ("kl" in own.get("algo", {})), "reward"]
    run: dict[str, Any] = yaml.safe_load(RECIPE)
    run["defaults"] = [f"configs/{file}.yaml" for file in ("debug/base", f"recipes/{name}")]
    run["groups"] = {"train": {"devices": 0, "roles": {role: {"tokens_per_micro_batch": 128} for role in roles}}}
    if "samples_per_prompt" in own["data"]:
        run["data"] |= {"prompts_per_step": 4, "samples_per_prompt": 4}
    if "critic" in own:  # a new head, as no model with one is there
        run["critic"] = {"optimizer": {"lr": 1e-3}, "head": "new", "head_std": 0.1}
    if "warmup_steps" in own.get("critic", {}):
        run["critic"]["warmup_steps"] = 1
    if "ptx" in own:
        texts = "configs/debug/data/demonstrations.jsonl"
        run["ptx"] = {"data": texts, "max_tokens": 64, "sequences_per_mini_batch": 4}
    if functions := own.get("reward", {}).get("functions"):
        functions[0]["args"] = {"max_tokens": 32, "buffer_tokens": 16}
        run["reward"] = {"functions": functions}
    (directory / f"{name}.yaml").write_text(yaml.safe_dump(run))
    return f"{name}.yaml"


# ---- what a run has written


def described(run: Path) -> dict[str, Any]:
    """Every file of a directory by what it says, but the trace; of files of other kinds there is the name alone."""
    readers: Mapping[str, Callable[[Path], Any]] = {
        ".jsonl": lines,
        ".json": lambda file: without_times(json.loads(file.read_text())),
        ".yaml": lambda file: yaml.safe_load(file.read_text()),
        ".safetensors": lambda file: {name: digest(own) for name, own in load_file(file).items()},
        ".npz": lambda file: {name: digest(torch.from_numpy(np.array(own))) for name, own in np.load(file).items()},
        ".metadata": checkpoint,
        ".pt": lambda file: repr(torch.load(file)),
    }
    found: dict[str, Any] = {}
    for file in sorted(file for file in run.rglob("*") if file.is_file() and file.name != "trace.json"):
        name, kind = str(file.relative_to(run)), file.suffix or file.name
        if kind in (".json", ".jsonl") and file.stat().st_size > LARGE:
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        else:
            found[re.sub(r"events\.out\..*", "events", name)] = readers[kind](file) if kind in readers else None
    return found


def lines(file: Path) -> dict[str, Any]:
    """The lines of a file by what tells them apart."""
    found: dict[str, Any] = {}
    for number, text in enumerate(file.read_text().splitlines(), 1):
        row = json.loads(text)
        name = ", ".join(f"{key} {row[key]}" for key in IDENTITY if key in row)
        found[name if name and name not in found else f"line {number}"] = without_times(row)
    return found


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(own) for key, own in value.items() if not TIMED.fullmatch(key)}
    return [without_times(own) for own in value] if isinstance(value, list) else value


def checkpoint(metadata: Path) -> dict[str, Any]:
    """The tensors of a role's checkpoint, whichever rank wrote what."""
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(metadata.parent, file.name)
        found = torch.load(file.name, weights_only=False)
    return {name: digest(own) if isinstance(own, torch.Tensor) else repr(own) for name, own in sorted(found.items())}


def digest(tensor: torch.Tensor) -> str:
    data = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()[:16]}"


# ---- comparing


def compare(one: Path, other: Path, only: tuple[str, ...], ignored: Sequence[str]) -> int:
    """Prints a line per part, and below it what differs; 1 where anything does."""
    first, second = (json.loads(file.read_text()) for file in (one, other))
    names = [name for name in {**first, **second} if name.startswith(only)]
    differ = 0
    for name in names:
        if name not in first or name not in second:
            differ += 1
            print(f"MISSING  {name}: not in {one if name not in first else other}")
            continue
        left, right = (dict(leaves(record[name])) for record in (first, second))
        places = [place for place in {**left, **right} if not any(re.search(own, place) for own in ignored)]
        wrong = [place for place in places if left.get(place) != right.get(place)]
        wrong.sort(key=lambda place: ".jsonl" not in place)  # metrics say more than digests of weights
        differ += bool(wrong)
        print(f"{'DIFFERS' if wrong else 'same':8} {name}: {len(wrong)} of {len(places)} values differ")
        for place in wrong:
            shown(place, left.get(place, ABSENT), right.get(place, ABSENT))
    print(f"{differ} of {len(names)} parts differ")
    return int(differ > 0)


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every value of a record as JSON, with its place."""
    if isinstance(value, (dict, list)) and value:
        for key, own in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(own, f"{place} > {key}" if place else str(key))
    else:
        yield place, json.dumps(value)


def shown(place: str, one: str, other: str) -> None:
    """Prints a difference; of texts the lines that differ."""
    if "\\n" not in one + other:
        print(f"    {place}: {one} | {other}")
        return
    print(f"    {place}:")
    before, after = (str(json.loads(own)).splitlines() if own != ABSENT else [] for own in (one, other))
    for line in difflib.unified_diff(before, after, lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            print(f"        {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
