"""Runs of the command line in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.leftovers import Trace
from tests.random_models import place_random_model

ROOT = Path(__file__).parents[2]
DEBUG = "configs/debug/ppo.yaml"
PARTS = (
    "algo.filter=nonzero_std",  # the responses that the length limit ends all score -1
    "data.curriculum=thompson",
    "data.score_range=[-1, 1]",
    "algo.early_stop={kl: 10}",
    "algo.kl.target=6",
    "algo.correction.weights={name: token_mask, upper: 5}",
    "critic.value_norm={}",
    "actor.ema.decay=0.9",
    "ptx={data: tests/e2e/texts.jsonl, max_tokens: 16, sequences_per_mini_batch: 3, coef: 0.1}",
)
"""Overrides of the debug run: parts of the algorithm that have a state, or more calls than its own."""

SECRETS = {"HF_TOKEN": "hf_nobodyknowsthis", "WANDB_API_KEY": "nobodyknowsthat"}
"""In the environment of every command."""
TIMES = ("time/", "perf/", "sync/", "memory/", "rollout/engine_idle")
"""Beginnings of the names of metrics that differ between equal runs."""
LIMIT_S = 560
"""Of a run that takes 40 s alone and several times as long beside others, on two slow cores."""
# A shell starts its background jobs with SIGINT ignored, and the tests may run in one.
_INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
_MEGARL = "from megarl.cli import main; main()"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that has ended.

    Args:
        status: exit status.
        output, errors: what it printed.
        processes: that it left.
        shared_memory: files in /dev/shm that it may have left.
        temporary: files that it left in its temporary directory.
    """

    status: int
    output: str
    errors: str
    processes: Sequence[str]
    shared_memory: set[str]
    temporary: Sequence[str]

    def assert_succeeded(self) -> None:
        """Asserts that the run has succeeded, and left nothing behind."""
        assert self.status == 0, self.errors
        self.assert_clean()

    def assert_clean(self) -> None:
        """Asserts that the run left nothing behind."""
        assert not self.processes, self.processes
        assert not self.shared_memory, self.shared_memory
        assert not self.temporary, self.temporary


@contextmanager
def started(
    arguments: Sequence[str], before: str = "pass", *, writes_model: bool = False
) -> Iterator[tuple[subprocess.Popen[str], Trace, Path]]:
    """A running command, the trace of everything it starts, and its temporary directory.

    Args:
        before: what its process does first, a line of Python.
        writes_model: whether a run writes its random model itself, or finds it.
    """
    if arguments[0] == "train" and not writes_model:
        place_random_model(ROOT / arguments[1], *arguments[2:])
    trace = Trace()
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        environment = {**trace.environment(), **SECRETS, "TMPDIR": directory, "OMP_NUM_THREADS": "1"}
        program = subprocess.Popen(
            [sys.executable, "-c", f"{_INTERRUPTIBLE}; {before}; {_MEGARL}", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield program, trace, Path(directory)
        finally:
            program.terminate()
            program.communicate()


def finish(program: subprocess.Popen[str], trace: Trace, directory: Path) -> Finished:
    """Waits for the end of a command."""
    output, errors = program.communicate(timeout=LIMIT_S)
    return Finished(
        status=program.returncode,
        output=output,
        errors=errors,
        processes=trace.processes(),
        shared_memory=trace.shared_memory(),
        temporary=os.listdir(directory),
    )


def run_to_end(arguments: Sequence[str], before: str = "pass", *, writes_model: bool = False) -> Finished:
    """Runs a command to its end; the arguments are those of `started`."""
    with started(arguments, before, writes_model=writes_model) as run:
        return finish(*run)


def train(run_dir: Path, *overrides: str, writes_model: bool = False) -> Finished:
    """Runs ``megarl train`` on the debug configuration to its end."""
    return run_to_end(["train", DEBUG, f"run.dir={run_dir}", *overrides], writes_model=writes_model)


def numbers(file: Path, left_out: tuple[str, ...] = TIMES) -> list[dict[str, Any]]:
    """The lines of a metrics file without metrics that begin with one of these words."""
    return [{name: value for name, value in line.items() if not name.startswith(left_out)} for line in lines(file)]


def lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines that are complete."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
