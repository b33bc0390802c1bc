"""Runs that are submitted to a real Slurm with ``megarl launch slurm``, and what is left of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.files import read_lines
from tests.leftovers import Trace
from tests.random_models import place_random_model
from tests.slurm.cluster import Slurm, SlurmError

ROOT = Path(__file__).parents[2]
LIMIT_S = 280.0
_PROFILE = """\
exclusive: false # jobs share the two nodes
cpus_per_task: 8
time: "00:20:00"
start_limit: 240
env: {OMP_NUM_THREADS: 1}
"""
SFT = (
    "configs/debug/sft.yaml",
    *("cluster.devices_per_node=1", "cluster.object_store_mib=80"),
    *("groups.train.devices=0-1", "groups.train.roles.actor={tp: 2, pp: 1, tokens_per_micro_batch: 128}"),
    "data.evaluation=null",
    "--nodes=2",
)
"""Supervised fine-tuning by two processes, one on each of two nodes."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that was submitted, and the id of its job."""

    slurm: Slurm
    job: int
    directory: Path

    @property
    def logs(self) -> Path:
        """The directory of the job's first attempt."""
        return self.directory / "slurm" / f"{self.job}-0"

    @property
    def output(self) -> str:
        """What the job has printed."""
        file = self.directory / "slurm" / f"{self.job}.out"
        return file.read_text() if file.exists() else ""

    @property
    def stages(self) -> dict[str, float]:
        """When the job reached which of its stages, in their order, seconds since 1970."""
        return {line["stage"]: line["time"] for line in read_lines(self.logs / "times.jsonl")}

    @property
    def end(self) -> dict[str, Any]:
        """The job's record of its end."""
        return json.loads((self.logs / "end.json").read_text())

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of all steps so far."""
        return read_lines(self.directory / "metrics.jsonl")

    def wait(self, state: str, limit_s: float = LIMIT_S) -> str:
        """Waits for the end of the job in a state; its exit code, as Slurm has it."""
        try:
            return self.slurm.wait(self.job, state, limit_s=limit_s)[0]["ExitCode"]
        except SlurmError as error:
            raise AssertionError(f"{error}\n{self.output}") from error

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Waits for a condition while the job runs; returns its value."""
        deadline = time.monotonic() + LIMIT_S
        while not (found := condition()):
            state = self.slurm.jobs(self.job)[0]["JobState"]
            assert state in ("PENDING", "RUNNING"), f"{state} before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"not {what} within {LIMIT_S:g} s:\n{self.output}"
            time.sleep(0.5)
        return found


class Launcher:
    """Submits runs, whose leftovers are found by a variable and a temporary directory."""

    def __init__(self, slurm: Slurm, directory: Path) -> None:
        self.slurm = slurm
        self._trace = Trace()
        self._temporary = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short: Ray has sockets in it
        self._profile = directory / "profile.yaml"
        self._profile.write_text(_PROFILE)
        self.environment = slurm.environment(**self._trace.environment(), TMPDIR=str(self._temporary))

    def launch(self, *arguments: str) -> list[int]:
        """Submits with ``megarl launch slurm``; the ids of the jobs."""
        done = self.megarl("launch", "slurm", "--profile", str(self._profile), *arguments)
        assert done.returncode == 0, done.stderr
        return [int(number) for number in re.findall(r"^job (\d+): ", done.stdout, re.MULTILINE)]

    def run(self, directory: Path, *arguments: str) -> Run:
        """Submits one run with this directory."""
        overrides = [argument for argument in arguments[1:] if not argument.startswith("--")]
        place_random_model(ROOT / arguments[0], *overrides, f"run.dir={directory}")
        (job,) = self.launch(*arguments, f"run.dir={directory}")
        return Run(slurm=self.slurm, job=job, directory=directory)

    def megarl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of megarl on this machine, the cluster's login node."""
        command = [sys.executable, "-m", "megarl", *arguments]
        return subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=120)

    def submit(self, script: Path) -> int:
        """Submits an unchanged script; returns the id of the job."""
        return int(self.slurm.run("sbatch", "--parsable", script, environment=self.environment))

    def processes(self, node: str, word: str) -> list[int]:
        """The living processes of the jobs on a node that have a word in their command lines."""
        found: list[int] = []
        for pid in self._trace.pids():
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                here = f"SLURMD_NODENAME={node}\0".encode() in environment
                if here and word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def left(self) -> Iterator[str]:
        """Processes, shared memory and temporary files of the jobs that are there."""
        yield from self._trace.processes()
        yield from self._trace.shared_memory()
        yield from os.listdir(self._temporary)

    def close(self) -> None:
        """Removes the temporary directory."""
        shutil.rmtree(self._temporary, ignore_errors=True)
