"""Reward functions that really hang, crash and raise: results of the calls, and leftovers."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import RewardFunction
from megarl.errors import RunError
from megarl.rewards.adapters import BoundFunction, Failure, Reply
from megarl.rewards.call_queue import FunctionCall, FunctionProcess
from megarl.rewards.child_process import serve
from megarl.rewards.functions import Completion
from tests.leftovers import comes_true
from tests.rewards.completions import completion, own

pytestmark = pytest.mark.process

LIMIT_S = 0.3
HANGING = ("sleeps", "holds_the_interpreter")
ENDING = {"exits": "exit status 3", "crashes": "SIGSEGV"}
NAMES = ["length", "process", *HANGING, *ENDING]


@pytest.fixture(scope="module")
def process() -> Iterator[FunctionProcess]:
    running = functions(*map(own, NAMES))
    yield running
    running.close()


def functions(*specs: RewardFunction, memory: int | None = None) -> FunctionProcess:
    return FunctionProcess(specs, 60.0, 0, memory)


def answer(
    process: FunctionProcess, function: int, given: Completion, limit: float = 60.0, deadline: float = math.inf
) -> Reply:
    """The reply to a single call that is not repeated."""
    process._time_limit = limit
    call = FunctionCall(function=function, completions=[given])
    process.make([call], deadline)
    return call.replies[0]


def call(process: FunctionProcess, name: str, limit: float = 60.0) -> float:
    score = answer(process, NAMES.index(name), completion(tokens=4), limit)
    assert isinstance(score, float), score
    return score


def fails(reply: Reply, reason: str) -> bool:
    return isinstance(reply, Failure) and re.search(reason, reply.reason) is not None


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ends(pid: int) -> bool:
    """Whether a process ends; one that was killed does so when the kernel next runs it."""
    return comes_true(lambda: not alive(pid))


@pytest.mark.parametrize("name", HANGING)
def test_a_call_that_hangs_ends_with_its_process_and_the_next_gets_another(process: FunctionProcess, name: str) -> None:
    before = call(process, "process")
    start = time.monotonic()
    reply = answer(process, NAMES.index(name), completion(tokens=4), LIMIT_S)
    assert fails(reply, r"it took longer than 0\.3 s, and was ended"), reply
    assert LIMIT_S <= time.monotonic() - start < 60
    assert ends(int(before))
    assert call(process, "process") != before


@pytest.mark.parametrize(("name", "end"), ENDING.items())
def test_a_function_that_ends_its_process_is_reported(process: FunctionProcess, name: str, end: str) -> None:
    reply = answer(process, NAMES.index(name), completion(tokens=4), 60.0)
    assert fails(reply, f"its process ended by {end}$"), reply
    assert call(process, "length") == 4


def test_a_process_that_ended_between_two_calls_is_replaced(process: FunctionProcess) -> None:
    pid = int(call(process, "process"))
    os.kill(pid, 9)
    child = process._child
    assert comes_true(lambda: child.ended)
    assert call(process, "process") != pid


@pytest.mark.parametrize("then", ["return", "exit", "sleep"])
def test_daemons_end_with_the_child(tmp_path: Path, then: str) -> None:
    pid_file = tmp_path / "pid"
    process = functions(own("starts_a_daemon", pid_file=str(pid_file), then=then))
    process.start()
    reply = answer(process, 0, completion(), 30.0 if then != "sleep" else 8.0)
    assert then == "sleep" or (reply == 1.0 if then == "return" else fails(reply, "ended by exit status 3"))
    assert alive(int(pid_file.read_text())) == (then == "return")
    process.close()
    assert not alive(int(pid_file.read_text()))


def test_a_process_may_be_closed_twice_and_used_again() -> None:
    process = functions(own("length"))
    process.close()
    for _ in range(2):
        assert answer(process, 0, completion(tokens=4)) == 4
        process.close()
        process.close()


class Unreadable:
    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


def served(messages: list[object], error: type[Exception]) -> None:
    """Serves a parent that sends messages and is gone, with calls that fail by an error."""

    def call(number: int, content: object) -> None:
        raise error(content)

    ours, theirs = Pipe()
    for message in messages:
        ours.send(message)
    with ours:
        serve(os.dup(theirs.fileno()), "test", lambda setup, connection: (setup, call))


@pytest.mark.parametrize(
    ("messages", "error"), [([Unreadable()], ValueError), (["setup", (0, "call")], EOFError)], ids=["setup", "call"]
)
def test_errors_of_the_child_itself_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch, messages: list[object], error: type[Exception]
) -> None:
    monkeypatch.setattr("megarl.rewards.child_process.answer_as_child", lambda part: None)
    with pytest.raises(error):
        served(messages, error)


def test_a_child_has_a_limit_of_memory() -> None:
    process = functions(own("takes_memory", mib=2048), memory=1 << 30)
    assert fails(answer(process, 0, completion(), 60.0), "MemoryError")
    process.close()


def test_all_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """The child, which holds the interpreter, and its daemon."""
    pid_file = tmp_path / "pid"
    program = (
        "from tests.rewards.completions import completion, own;"
        "from tests.rewards.test_process import answer, functions;"
        f"daemon = own('starts_a_daemon', pid_file={str(pid_file)!r});"
        "process = functions(own('process'), daemon, own('holds_the_interpreter'));"
        "answer(process, 1, completion());"
        "print(int(answer(process, 0, completion())), flush=True);"
        "answer(process, 2, completion(), 600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()), int(pid_file.read_text())]
        assert all(map(alive, pids))
        parent.kill()
    assert all(map(ends, pids))


def test_functions_that_cannot_be_loaded_fail_the_run() -> None:
    process = functions(RewardFunction(name="tests.rewards.functions:nothing"))
    with pytest.raises(RunError, match=r"cannot start: the module .* has no 'nothing'"):
        process.start()


LOADS_ONCE = """
import os, time
from pathlib import Path

if Path("loaded").exists():
    {again}
Path("loaded").touch()


def ends(completion):
    os._exit(3)
"""


@pytest.mark.parametrize(
    ("again", "told", "patience"),
    [
        (
            "raise OSError('the port is in use')",
            r"cannot start: the module .* cannot be imported:(.|\n)*the port is in use",
            60,
        ),
        ("os._exit(7)", "cannot start: exit status 7", 60),
        ("time.sleep(600)", "cannot start: no time was left to load them", 3),
    ],
)
def test_functions_that_cannot_be_reloaded_fail_their_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str, told: str, patience: float
) -> None:
    (tmp_path / "loads_once.py").write_text(LOADS_ONCE.format(again=again))
    monkeypatch.chdir(tmp_path)
    process = functions(RewardFunction(name="loads_once:ends"))
    process.start()
    for reason, seconds in (("its process ended by exit status 3", 60), (told, patience)):
        reply = answer(process, 0, completion(), 60.0, time.monotonic() + seconds)
        assert fails(reply, reason), reply
    process.close()


@pytest.mark.parametrize("value", [True, 2, np.float32(0.5), np.bool_(True), Fraction(1, 2), -3.0e38])
def test_any_finite_number_is_a_score(value: Any) -> None:
    assert BoundFunction(own("anything")).replies([completion(returns=value)]) == [float(value)]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None, a NoneType"),
        (math.nan, "nan, a float"),
        (-math.inf, "-inf, a float"),
        (1e39, "1e+39, a float"),
        (10**39, f"{10**39}, a int"),
        ("1.0", "'1.0', a str"),
        ([1.0], r"[1.0], a list"),
        (np.ones(2), "array([1., 1.]), a ndarray"),
        (1j, "1j, a complex"),
        ("x" * 1000, "'" + "x" * 199 + ", a str"),
    ],
)
def test_any_other_score_is_refused_and_shown(value: Any, shown: str) -> None:
    reason = f"it returned {shown}: it must return one finite number"
    expected = [Failure(kind=type(value).__name__, reason=reason)]
    assert BoundFunction(own("anything")).replies([completion(returns=value)]) == expected


def test_a_score_that_cannot_be_read_fails_its_call_alone() -> None:
    (failure,) = BoundFunction(own("anything")).replies([completion(returns=10**400)])
    assert isinstance(failure, Failure)
    assert failure.kind == "OverflowError"


def test_a_traceback_shows_only_the_functions_frames() -> None:
    (failure,) = BoundFunction(own("quotient", size=1)).replies([completion(tokens=1)])
    assert isinstance(failure, Failure)
    assert failure.kind == "ZeroDivisionError"
    told = failure.reason
    assert told.startswith("Traceback (most recent call last):\n")
    assert "return 1.0 / (len(completion.response_ids) - size)" in told
    assert told.endswith("ZeroDivisionError: float division by zero")
    assert "megarl/rewards" not in told
