"""A real Slurm on loopback as one object: munged, mariadbd, slurmdbd, slurmctld and two slurmd of Debian's packages."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.slurm.daemons import Daemon, DaemonError
from tests.slurm.database import database, unreachable
from tests.slurm.files import NODES, write_files

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_COMMAND_S = 60.0


class SlurmError(RuntimeError):
    """A command of Slurm failed, or a job did not get where it was expected."""


class Slurm:
    """A context: inside, jobs run on the nodes n1 and n2; afterwards no process, socket or file is left.

    The partition `all` is the default one and has both nodes. Jobs share the nodes. A node that fails is noticed within
    a minute.
    """

    def __init__(self) -> None:
        # Not below TMPDIR: the path of a socket may have 107 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.directory.chmod(0o711)  # munged wants its socket to be in reach of everybody
        self._daemons: dict[str, Daemon] = {}

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a program that talks to this Slurm, and to no other that the tests may run in."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        return {**kept, "SLURM_CONF": str(self.directory / "slurm.conf"), **more}

    def run(self, *command: str | Path, environment: Mapping[str, str] | None = None, stdin: str = "") -> str:
        """The output of a command of Slurm; raises SlurmError with what it said, if it fails."""
        words = [str(word) for word in command]
        environment = environment or self.environment()
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, env=environment, timeout=_COMMAND_S)
        if done.returncode != 0:
            raise SlurmError(f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def jobs(self, job: int) -> list[dict[str, str]]:
        """What the controller says of a job: one record, or one of each task of an array or component of a het job."""
        lines = self.run("scontrol", "--oneliner", "show", "job", str(job)).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]

    def wait(self, job: int, *states: str, limit_s: float = 60.0) -> list[dict[str, str]]:
        """`jobs` when all of them are in one of the states (by default any end), or SlurmError."""
        wanted = states or ENDED
        deadline = time.monotonic() + limit_s
        while True:
            found = self.jobs(job)
            now = [one["JobState"] for one in found]
            if all(state in wanted for state in now):
                return found
            if any(state in ENDED and state not in wanted for state in now) or time.monotonic() > deadline:
                raise SlurmError(f"job {job} is {now}, not {wanted}, after up to {limit_s:g} s: {found}\n{self.logs()}")
            time.sleep(0.3)

    def kill_daemon(self, node: str) -> None:
        """Kills the slurmd of a node; its tasks continue."""
        self._daemons[f"slurmd-{node}"].kill()

    def declare_down(self, node: str) -> None:
        """Lets the controller do at once what it does when a node has not answered for SlurmdTimeout."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=tested")

    def tidy(self) -> None:
        """Ends all jobs, and starts daemons that were killed; returns when both nodes are idle."""
        self.run("scancel", "--full", "--user", str(os.geteuid()))
        for node in NODES:
            daemon = self._daemons[f"slurmd-{node}"]
            if not daemon.runs():
                daemon.start()
        self._daemons["slurmctld"].wait(self._not_idle, "told of two idle nodes", limit_s=180)

    def logs(self) -> str:
        """The ends of the logs of all daemons."""
        return "\n".join(daemon.tail() for daemon in self._daemons.values())

    def close(self) -> None:
        """Ends the jobs, then the daemons, then whatever is left of both, and removes the files."""
        try:
            with suppress(SlurmError, DaemonError, KeyError, OSError, subprocess.TimeoutExpired):
                self.tidy()
        finally:
            for daemon in reversed(self._daemons.values()):
                daemon.stop()
            self._kill()
            shutil.rmtree(self.directory)

    def _start(self) -> None:
        at = self.directory
        write_files(at)
        munge = ("--key-file", at / "munge.key", "--socket", at / "munge.socket", "--seed-file", at / "munge.seed")
        munge_files = ("--pid-file", at / "munged.pid", "--log-file", at / "munge.log")
        (at / "munge.key").write_bytes(secrets.token_bytes(128))
        (at / "munge.key").chmod(0o600)
        munged = self._daemon("munged", "munged", "--foreground", *munge, *munge_files)
        mariadbd = self._daemon("mariadbd", "mariadbd", *database(at / "db"), "--skip-grant-tables")
        mariadbd.wait(lambda: unreachable(at / "db" / "socket"), "listening")
        munged.wait(lambda: unreachable(at / "munge.socket"), "listening")

        slurmdbd = self._daemon("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=str(at / "db" / "socket"))
        slurmdbd.wait(lambda: self._fails("sacctmgr", "-n", "show", "cluster"), "answering sacctmgr")
        slurmctld = self._daemon("slurmctld", "slurmctld", "-D")
        slurmctld.wait(lambda: self._fails("scontrol", "ping"), "answering scontrol")
        slurmds = [self._daemon(f"slurmd-{node}", "slurmd", "-D", "-N", node) for node in NODES]
        for daemon, node in zip(slurmds, NODES, strict=True):
            daemon.wait(lambda node=node: self._not_idle(node), "idle")

    def _daemon(self, name: str, *command: str | Path, **environment: str) -> Daemon:
        log = self.directory / f"{name}.log"
        daemon = self._daemons[name] = Daemon(command, log=log, environment=self.environment(**environment))
        daemon.start()
        return daemon

    def _fails(self, *command: str) -> str:
        try:
            self.run(*command)
        except SlurmError as error:
            return str(error)
        return ""

    def _not_idle(self, *nodes: str) -> str:
        told = self.run("sinfo", "-h", "-N", "-p", "all", "-n", ",".join(nodes or NODES), "-o", "%N=%t %E")
        idle = "\n".join(f"{node}=idle none" for node in nodes or NODES)
        return "" if told == idle else told

    def _kill(self) -> None:
        """Kills the processes of this cluster, until there are none."""
        deadline = time.monotonic() + _COMMAND_S
        while found := self._processes():
            if time.monotonic() > deadline:
                raise SlurmError(f"processes cannot be killed: {found}")
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def _processes(self) -> list[int]:
        """Processes that have the cluster's directory in their environment or command line."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                told = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if str(self.directory).encode() in told and entry.name != str(os.getpid()):
                    found.append(int(entry.name))
        return found
