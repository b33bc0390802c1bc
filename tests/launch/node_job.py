"""A job of two nodes on this machine: two agents, as srun would start them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.leftovers import Trace, comes_true

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
ONE_EACH = (
    "cluster.devices_per_node=1",
    *("groups.train.devices=0-1", "groups.train.roles.actor={tp: 2, pp: 1, tokens_per_micro_batch: 128}"),
)
"""Overrides of a run that has one process on each node."""
STAGES = (
    *("agent started", "configuration checked", "all connected", "Ray ready"),
    *("driver started", "driver ended", "stopped"),
)
"""Of a job that ends well."""
NOTHING: tuple[list[str], set[str], list[str]] = ([], set(), [])
"""Of `left`, where nothing is."""
NUMBER = os.getpid()
"""Of a job; others that test on this machine have jobs with other numbers, and so other ports."""
_TOKEN = secrets.token_hex(32)


class NodeJob:
    """A context: a job with a scripted driver, or one that trains (None); nothing is left of it."""

    number = NUMBER

    def __init__(self, directory: Path, driver: str | None, *overrides: str, limit_s: float = PATIENCE_S) -> None:
        self.trace = Trace()
        self.run = directory / "run"
        self.logs = self.run / "slurm" / f"{NUMBER}-0"
        self._directory, self._driver = directory, driver
        module = "megarl.launch.node" if driver is None else "tests.launch.node_program"
        self._command = [
            *(sys.executable, "-m", module, "--start-limit", str(limit_s), "train", "configs/debug/sft.yaml"),
            *("cluster.nodes=2", "cluster.devices_per_node=2", "cluster.object_store_mib=80"),
            *(f"run.dir={self.run}", *overrides),
        ]
        self.agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int, environment: Mapping[str, str] | None = None, *, options: Sequence[str] = ()) -> None:
        """Starts a node's agent, with options that real ones have."""
        of_the_task = {
            **self.trace.environment(),
            "SLURM_JOB_ID": str(self.number),
            "SLURM_NTASKS": "2",
            "SLURM_STEP_NODELIST": "n[1-2]",
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "SLURM_NODEID": str(index),
            "RAY_AUTH_TOKEN": _TOKEN,
            "MEGARL_TEST_DRIVER": str(self._driver),
            "TMPDIR": str(self._directory),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # what Ray prints is in the log at once
        }
        with self._output(index).open("wb") as output:
            self.agents[index] = subprocess.Popen(
                [*self._command[:3], *options, *self._command[3:]],
                cwd=ROOT,
                env={**of_the_task, **(environment or {})},
                stdout=output,
                stderr=output,
            )

    def __enter__(self) -> Self:
        self.start(1)
        self.start(0)
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.wait()

    def until(self, text: str, log: str = "driver.log") -> None:
        """Waits until a log contains a text."""
        found = comes_true(lambda: text in self.log(log), PATIENCE_S)
        assert found, self.output(0) + self.output(1)

    def log(self, name: str) -> str:
        """The content of a file in the job's directory; empty if it is missing."""
        path = self.logs / name
        return path.read_text() if path.exists() else ""

    def output(self, index: int) -> str:
        """What an agent has printed."""
        return self._output(index).read_text()

    def exit_codes(self) -> tuple[int, ...]:
        """How the agents end, the head's first; waits for them."""
        return tuple(self.agents[index].wait(PATIENCE_S) for index in sorted(self.agents))

    def end(self) -> dict[str, Any]:
        """The job's record of its end."""
        return json.loads(self.log("end.json"))

    def left(self) -> tuple[list[str], set[str], list[str]]:
        """Leftovers: processes, shared memory, temporary files. Guards may still work after agents were killed."""
        comes_true(lambda: not self.trace.processes(), 30)
        temporary = [path.name for path in self._directory.iterdir() if path.name.startswith("megarl-")]
        return self.trace.processes(), self.trace.shared_memory(), temporary

    def kill(self, text: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to the job's processes of this command line; there is at least one."""
        found: list[int] = []
        for pid in self.trace.pids():
            with suppress(OSError):  # it has ended
                if text in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                    found.append(pid)
        assert found, f"no {text} among {self.trace.processes()}"
        for pid in found:
            with suppress(ProcessLookupError):  # the first ones that end may end others
                os.kill(pid, number)

    def _output(self, index: int) -> Path:
        return self._directory / f"agent-{index}.out"
