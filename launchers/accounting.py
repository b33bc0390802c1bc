"""Slurm's accounting: what becomes of an experiment's jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

import nemo_run as run
import paramiko
from invoke.exceptions import ThreadException

# NeMo-Run's tunnel ends the process where it cannot log in (nemo_run/core/tunnel/client.py, SSHTunnel._authenticate).
LOST = (OSError, EOFError, paramiko.SSHException, ThreadException, SystemExit)
"""What a connection is lost with, or cannot be made with."""
COMPLETED = "COMPLETED"
"""The state of a job that has succeeded."""
_PENDING = "PENDING"
_NOT_ENDED = frozenset(
    {
        *(_PENDING, "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING", "COMPLETING"),
        *("CONFIGURING", "SIGNALING", "STAGE_OUT", "STOPPED"),
    }
)
_FIRST_PAUSE_S, _LAST_PAUSE_S = 2.0, 30.0
"""Between two looks into the accounting, which many share: it is asked less often the longer jobs take."""
_LIMIT_S = 120.0


class AccountingError(RuntimeError):
    """Slurm's accounting gives no answer, or cannot be reached."""


def followed(
    tunnel: run.SSHTunnel | run.LocalTunnel,
    numbers: Mapping[str, str],
    *,
    pause_s: float = _FIRST_PAUSE_S,
    limit_s: float = _LIMIT_S,
) -> dict[str, str]:
    """Tells on the standard output of each change of a job's state, until all jobs have ended.

    Args:
        tunnel: to where Slurm's commands are.
        numbers: of the jobs, by task.
        pause_s: before the second look, in seconds; the pauses become longer.
        limit_s: for which there may be no answer, in seconds.

    Returns:
        The last state of each job, as Slurm calls it, by task.

    Raises:
        AccountingError: There was no answer for so long.
    """
    known: dict[str, str] = {}
    silent_since: float | None = None
    while True:
        try:
            told = states(tunnel, numbers)
            silent_since = None
        except AccountingError as error:
            told = known
            if silent_since is None:
                silent_since = time.monotonic()
                print(f"{error}; it is asked again", file=sys.stderr)
            elif time.monotonic() - silent_since > limit_s:
                raise
        for task, state in told.items():
            if known.get(task) != state:
                print(f"{time.strftime('%H:%M:%S')} {task}: {state}", flush=True)
        known = told
        if known and _NOT_ENDED.isdisjoint(known.values()):
            return known
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.1, _LAST_PAUSE_S)


def states(tunnel: run.SSHTunnel | run.LocalTunnel, numbers: Mapping[str, str]) -> dict[str, str]:
    """The state of each job, by task; one of which the accounting does not know yet is pending.

    Raises:
        AccountingError: There is no answer.
    """
    command = f"sacct -X -n -P -o JobIDRaw,State -j {','.join(numbers.values())}"
    try:
        done = tunnel.run(command, hide=True, warn=True, in_stream=False)
    except LOST as error:
        raise AccountingError(f"Slurm's accounting cannot be reached: {reason(error)}") from error
    if done.failed:
        said = " ".join(done.stderr.split()) or f"exit code {done.exited}"
        raise AccountingError(f"Slurm's accounting gives no answer: sacct: {said}")
    rows = (line.partition("|") for line in done.stdout.splitlines())
    found = {number: state.split()[0] for number, _, state in rows if state.strip()}  # of "CANCELLED by 0" the first
    return {task: found.get(number, _PENDING) for task, number in numbers.items()}


def reason(error: BaseException) -> str:
    """Of a lost connection, in one line."""
    if isinstance(error, ThreadException):  # of the threads that carry a command's output
        error = error.exceptions[0].value
    said = "the login was refused" if isinstance(error, SystemExit) else " ".join(str(error).split())
    return said or type(error).__name__
