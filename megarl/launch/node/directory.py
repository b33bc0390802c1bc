"""What a job leaves in the run's directory: logs, times, how to look into it, and how it ended."""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from megarl.files import write_durably
from megarl.launch.node.endings import Outcome
from megarl.launch.node.slurm_job import SlurmJob

log = logging.getLogger(__name__)

_COMPONENT = """\
case "$node" in
    {others}) component=1 ;;
    *) component=0 ;;
esac
"""
_ATTACH = """\
#!/bin/sh
# A shell on a node of the running job, the first or the one that is named. Programs find the job's Ray from it; of
# Ray's commands, ray memory and ray health-check do. The others ask a dashboard, and a job has none.
#   {path} [NODE]
node="${{1:-{head}}}"
case " {nodes} " in
    *" $node "*) ;;
    *) echo "$node is none of the job's nodes: {nodes}" >&2; exit 2 ;;
esac
{component}exec srun --jobid={job} {group}--overlap --nodes=1 --ntasks=1 --nodelist="$node" --pty \\
    env RAY_ADDRESS={ray} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token} "${{SHELL:-/bin/sh}}"
"""


class JobDirectory:
    """The directory of an attempt of a job, under the run's; every node of the job sees it.

    Args:
        path: of the directory, absolute.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token, self._end = path / "token", path / "end.json"

    @classmethod
    def of(cls, run_dir: str, job: SlurmJob) -> JobDirectory:
        """The directory of this attempt."""
        return cls(Path(run_dir).absolute() / "slurm" / f"{job.id}-{job.attempt}")

    def begin(self) -> None:
        """Makes the directory; an earlier step of the job may have ended in it.

        Raises:
            OSError: it cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._end.unlink(missing_ok=True)

    @property
    def driver_log(self) -> Path:
        """What the driver prints."""
        return self.path / "driver.log"

    def log(self, index: int) -> Path:
        """What a node's agent, and its Ray, print."""
        return self.path / f"{_place(index)}.log"

    def ray_logs(self, index: int) -> Path:
        """Where the logs of a node's Ray are kept when the job fails."""
        return self.path / f"ray-{_place(index)}"

    def reached(self, stage: str, when: float | None = None) -> None:
        """Adds a line to the times.

        Args:
            stage: that the job has reached.
            when: seconds since the epoch; None is now.
        """
        line = json.dumps({"stage": stage, "time": round(time.time() if when is None else when, 3)})
        with _warning(), (self.path / "times.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def write_attach(self, job: SlurmJob, ray_address: str, secret: str) -> None:
        """Writes the script that opens a shell in the job, and the token that it needs, for its owner alone."""
        with _warning():
            self._write_attach(job, ray_address, secret)

    def _write_attach(self, job: SlurmJob, ray_address: str, secret: str) -> None:
        self._token.unlink(missing_ok=True)
        with os.fdopen(os.open(self._token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secret)
        script = self.path / "attach"
        values = {
            "path": shlex.quote(str(script)),
            "token": shlex.quote(str(self._token)),
            "nodes": " ".join(job.nodes),
            "component": "",
            "group": "",
        }
        if len(job.components) == 2:
            component = _COMPONENT.format(others=" | ".join(job.components[1]))
            values |= {"component": component, "group": '--het-group="$component" '}
        script.write_text(_ATTACH.format(job=job.id, head=job.nodes[0], ray=ray_address, **values), encoding="utf-8")
        script.chmod(0o755)

    def write_end(self, outcome: Outcome) -> None:
        """Writes how the job has ended; its token opens nothing any more."""
        with _warning():
            self._token.unlink(missing_ok=True)
        with _warning():
            write_durably(self._end, json.dumps(asdict(outcome)) + "\n")

    def add_to_driver_log(self, text: str) -> None:
        """Adds a line to what the driver has printed, if there was one."""
        if self.driver_log.exists():
            with _warning(), self.driver_log.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")


@contextmanager
def _warning() -> Iterator[None]:
    """Says so where nothing can be written, as on a full disk: the job goes on, and ends in order, without."""
    try:
        yield
    except OSError as error:
        log.warning("not written: %s", error)


def _place(index: int) -> str:
    return "head" if index == 0 else f"worker-{index}"
