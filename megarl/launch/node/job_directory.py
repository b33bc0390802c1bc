"""RUN_DIR/slurm/JOB-ATTEMPT, which the nodes of a job share: logs, times, Ray's address, exit reason."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.errors import PreemptedError
from megarl.files import write_durably
from megarl.launch.node.slurm_job import SlurmJob
from megarl.run.paths import JOB_END, JOBS

_NO_FAILURE = (0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM, PreemptedError.exit_code)
"""Exit codes of success, a user's mistake, a stop by a signal, and a preempted run that has saved."""
_RAY = "ray.json"

log = logging.getLogger(__name__)


@dataclass(eq=False)
class JobEnded(Exception):  # noqa: N818  (also of a job that succeeds)
    """Why a job ends, and the name of the node at fault, if any; raised to end the job here."""

    exit_code: int
    reason: str
    node: str | None = None

    def __str__(self) -> str:
        return self.reason

    @property
    def failed(self) -> bool:
        """Whether the job failed, so that Ray's logs are kept."""
        return self.exit_code not in _NO_FAILURE


class JobDirectory:
    """The directory of one attempt of a job."""

    def __init__(self, run_dir: str, job: SlurmJob) -> None:
        """Makes the directory; may raise OSError."""
        self._job = job
        self.path = Path(run_dir).absolute() / JOBS / f"{job.id}-{job.attempt}"
        self.path.mkdir(parents=True, exist_ok=True)
        self.driver_log = self.path / "driver.log"

    def log(self, index: int) -> Path:
        return self.path / f"{_role(index)}.log"

    def ray_logs(self, index: int) -> Path:
        return self.path / f"ray-{_role(index)}"

    def begin(self) -> None:
        """Tells the other nodes that the head has started; removes the end of an earlier step of the job."""
        (self.path / JOB_END).unlink(missing_ok=True)
        self.publish_ray("")

    def publish_ray(self, address: str) -> None:
        """Tells the other nodes HOST:PORT of the job's Ray; empty before it starts."""
        write_durably(self.path / _RAY, json.dumps({"step": self._job.step, "address": address}) + "\n")

    def ray_address(self) -> str | None:
        """Returns the address that the head of this step has published; None before it has started."""
        published = self._read(_RAY)
        if published.get("step") != self._job.step:
            return None
        return published["address"]

    def missing(self) -> list[int]:
        """Returns the indices of the nodes whose agents have not opened their logs."""
        names = self._names()
        return [index for index in range(len(self._job.nodes)) if self.log(index).name not in names]

    def end(self) -> JobEnded | None:
        """Returns why the job ends; None while it runs."""
        end = self._read(JOB_END)
        return JobEnded(**end) if end else None

    def _names(self) -> list[str]:
        """Lists the directory: on NFS this shows new files before they can be opened by name."""
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    def _read(self, name: str) -> dict[str, Any]:
        if name not in self._names():
            return {}
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def reached(self, stage: str, when: float | None = None) -> None:
        """Appends a stage and its time, seconds since 1970 or now, to times.jsonl."""
        line = json.dumps({"stage": stage, "time": round(when or time.time(), 3)})
        with _warning(), (self.path / "times.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def write_end(self, end: JobEnded) -> None:
        """Writes why the job ends, which ends it on every node."""
        with _warning():
            write_durably(self.path / JOB_END, json.dumps(asdict(end)) + "\n")

    def add_to_driver_log(self, text: str) -> None:
        if self.driver_log.exists():
            with _warning(), self.driver_log.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")


@contextmanager
def _warning() -> Iterator[None]:
    """Logs a warning if a file cannot be written, as on a full disk; the job continues."""
    try:
        yield
    except OSError as error:
        log.warning("not written: %s", error)


def _role(index: int) -> str:
    return "head" if index == 0 else f"worker-{index}"
