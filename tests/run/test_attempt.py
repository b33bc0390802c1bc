"""Every end of a run is recorded, once."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from megarl.config import ConfigError, Problem
from megarl.errors import PreemptedError, RunError
from megarl.run.attempts import Attempt, read_attempts
from megarl.run.directory import attempt
from megarl.run.paths import RunPaths
from megarl.run.sinks import JsonlSink

PROBLEM = Problem(field="data", value="changed", rule="it stays", fix="restore it")


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


ENDS: dict[str, tuple[Callable[[], None], type[BaseException] | None, tuple[str, str]]] = {
    "the end": (lambda: None, None, ("finished", "")),
    "a mistake": (
        raising(ConfigError([PROBLEM])),
        ConfigError,
        ("config error", f"configuration: 1 problem\n{PROBLEM}"),
    ),
    "a failure": (raising(RunError("train rank 3 died")), RunError, ("run error", "train rank 3 died")),
    "a full disk": (
        raising(OSError(errno.ENOSPC, "No space left on device (4 KiB free)", "run/metrics.jsonl")),
        RunError,
        (
            "run error",
            "run/metrics.jsonl: No space left on device (4 KiB free); make space, and start the run again",
        ),
    ),
    "a preemption": (raising(PreemptedError("after step 6")), PreemptedError, ("preempted", "after step 6")),
    "anything else": (
        lambda: 1 // 0,
        ZeroDivisionError,
        ("exception", "ZeroDivisionError: integer division or modulo by zero"),
    ),
    "an interrupt": (raising(KeyboardInterrupt()), KeyboardInterrupt, ("interrupted", "SIGINT")),
    "a termination": (terminated, SystemExit, ("interrupted", "SIGTERM")),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_recorded_end_is_final(tmp_path: Path, name: str) -> None:
    run, error, end = ENDS[name]
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    directory = RunPaths(tmp_path)
    directory.metrics.write_text('{"step": 5}\n{"step": 6}\n{"st')
    raised: type[BaseException] | None = None
    try:
        with attempt(directory, taken=4):
            assert read_attempts(directory.attempts)[0].end is None
            run()
    except BaseException as found:
        raised = type(found)
    assert raised is error
    (noted,) = read_attempts(directory.attempts)
    assert (noted.number, noted.step) == (1, 4)
    assert noted.end is not None
    assert (noted.end.step, noted.end.reason, noted.end.message) == (6, *end)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("error", [SystemExit(143), PreemptedError("preempted after step 6")])
def test_an_interrupt_is_recorded_before_the_session_ends(tmp_path: Path, error: BaseException) -> None:
    directory = RunPaths(tmp_path)
    at_the_end: list[Attempt] = []

    def end_within_a_session() -> None:
        with attempt(directory) as interrupts_are_recorded, ExitStack() as session:
            session.callback(lambda: at_the_end.extend(read_attempts(directory.attempts)))
            session.enter_context(interrupts_are_recorded())
            raise error

    with pytest.raises(type(error)):
        end_within_a_session()
    assert at_the_end[0].end is not None
    assert at_the_end == read_attempts(directory.attempts)
    assert len(directory.attempts.read_text().splitlines()) == 2


def test_a_run_without_a_step_ends_at_its_initial_step(tmp_path: Path) -> None:
    directory = RunPaths(tmp_path)
    with attempt(directory, taken=4):
        pass
    with attempt(directory, reason="profiled"):
        pass
    ends = [
        (found.number, found.end and (found.end.step, found.end.reason)) for found in read_attempts(directory.attempts)
    ]
    assert ends == [(1, (4, "finished")), (2, (0, "profiled"))]


@pytest.mark.parametrize("all_files", [True, False])
def test_removed_files_of_a_run_are_reported_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], *, all_files: bool
) -> None:
    directory = RunPaths(tmp_path / "run")
    directory.path.mkdir()
    sink = JsonlSink(directory.metrics)

    def write() -> None:
        with attempt(directory):
            sink.write(1, {})
            if all_files:
                shutil.rmtree(directory.path)
            else:
                directory.metrics.unlink()
            sink.write(2, {})

    with pytest.raises(RunError, match=r"metrics\.jsonl: No such file or directory; only the run may change"):
        write()
    assert capfd.readouterr().err == ""


def test_an_error_of_other_files_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), attempt(RunPaths(tmp_path / "run")):
        (tmp_path / "mine").read_text()
