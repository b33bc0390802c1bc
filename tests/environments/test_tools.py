"""Tools: their schemas, their calls, and the built-in ones."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from megarl.environments import python_program
from megarl.environments.environment import Action, EnvironmentTask, Observation, ToolCall
from megarl.environments.python_program import bubblewrap, python
from megarl.environments.tool_environment import Tool, ToolEnvironment
from tests.debian import BUBBLEWRAP, missing
from tests.leftovers import comes_true
from tests.needs import lacking
from tests.rewards.test_process import alive


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """Tells the weather of some days.

    Args:
        city: name of the city,
            as people there write it
        days: how many: at least 1
        unit: of the temperature

    Returns:
        A number per day.
    """
    return {"city": city, "temperatures": [20] * days, "unit": unit}


async def broken(reason: str) -> str:
    """Fails."""
    raise RuntimeError(reason)


async def exits(status: int) -> str:
    """Ends the program."""
    sys.exit(status)


class Shop(ToolEnvironment):
    """A shop, whose public methods are tools."""

    def reset(self, task: EnvironmentTask, seed: int) -> Any:
        self._stock = dict(task.fields["stock"])
        return task.messages

    async def buy(self, item: str, count: int) -> int:
        """Buys some of an item, and returns how many are left."""
        self._stock[item] -= count
        return self._stock[item]

    def score(self, answer: Action) -> float:
        return float(answer.content == str(sum(self._stock.values())))


def action(*calls: ToolCall, content: str = "", finished: bool = True) -> Action:
    return Action(text=content, content=content, token_ids=(), finished=finished, tool_calls=calls)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, call_id=f"call of {name}")


def step(environment: ToolEnvironment, taken: Action) -> Observation:
    return asyncio.run(environment.step(taken))


def answers(observation: Observation) -> list[str]:
    assert not isinstance(observation.messages, str)
    assert all(message["role"] == "tool" for message in observation.messages)
    return [message["content"] for message in observation.messages]


def test_schemas_are_those_of_transformers() -> None:
    from transformers.utils import get_json_schema

    ours: Mapping[str, Any] = Tool("weather", weather).schema["function"]
    theirs: Mapping[str, Any] = get_json_schema(weather)["function"]
    assert (ours["name"], ours["description"]) == (theirs["name"], theirs["description"])
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    for name, described in theirs["parameters"]["properties"].items():
        mine = dict(ours["parameters"]["properties"][name])
        assert " ".join(described.pop("description").split()) == mine.pop("description")
        assert described.items() <= mine.items()


def test_calls_are_answered_and_what_is_wrong_with_them_is_told() -> None:
    names = ["weather", "broken", "exits"]
    environment = ToolEnvironment([f"tests.environments.test_tools:{name}" for name in names])
    assert [tool["function"]["name"] for tool in environment.tools] == names
    calls = [
        call("weather", city="Bonn", days="2"),
        call("weather", city="Bonn", days="two", wind=1),
        call("broken", reason="no luck"),
        call("exits", status=3),
        call("clock"),
        ToolCall(name="", problem="not a call"),
    ]
    observation = step(environment, action(*calls))
    told = answers(observation)
    assert json.loads(told[0]) == {"city": "Bonn", "temperatures": [20, 20], "unit": "C"}
    assert told[1].startswith("error: arguments of weather: days: ")
    assert "wind: " in told[1]
    assert told[2:] == [
        "error: RuntimeError: no luck",
        "error: SystemExit: 3",
        "error: ValueError: there is no tool 'clock'; there are weather, broken, exits",
        "error: ValueError: not a call",
    ]
    assert not isinstance(observation.messages, str)
    assert [m["tool_call_id"] for m in observation.messages[:2]] == ["call of weather"] * 2
    assert not observation.done
    assert observation.metrics == {"tool_calls": 6, "failed_tool_calls": 5}


def test_a_subclass_has_its_methods_as_tools_and_scores_the_answer() -> None:
    shop = Shop(["tests.environments.test_tools:weather"])
    assert [tool["function"]["name"] for tool in shop.tools] == ["buy", "weather"]
    shop.reset(EnvironmentTask(prompt_id="0", fields={"stock": {"apple": 5, "pear": 4}}), 0)
    observation = step(shop, action(call("buy", item="apple", count=2), call("buy", item="pear", count=0)))
    assert answers(observation) == ["3", "4"]
    ended = step(shop, action(content="7"))
    assert (ended.done, ended.reward, ended.metrics["tool_calls"]) == (True, 1, 2)
    cut = step(shop, action(call("buy", item="apple", count=2), finished=False))
    assert (cut.truncated, cut.done, cut.metrics["tool_calls"]) == (True, False, 2)


@pytest.fixture(scope="module")
def sandbox() -> None:
    if missing(BUBBLEWRAP):
        lacking("no bubblewrap on this machine: make sandbox installs it")


def fails(program: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        python(program)


@pytest.mark.process
@pytest.mark.usefixtures("sandbox")
def test_python_runs_with_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    monkeypatch.setattr(python_program, "_SECONDS", 60)  # on a busy machine, files and memory take a while to fill
    found = "import os; open('x', 'w').write('y'); print(os.listdir('.'), 'SECRET_KEY' in os.environ)"
    assert python(found) == "['x'] False"
    assert python(found) == "['x'] False"  # nothing of the first is there
    shown = python("print('a' * 10000)")
    assert len(shown) < 4100
    assert "6000 characters are left out: more than 4000 are not shown" in shown
    fails("1 / 0", "ZeroDivisionError")
    fails("'a' * 10 ** 10", "MemoryError")
    fails("open('x', 'w').write('y' * 2 ** 27)", "File too large")
    fails("for i in range(9): open(str(i), 'w').write('y' * 2 ** 24)", "No space left on device")
    fails("import sys; sys.exit(3)", "exit status 3")
    fails("while True: print('x' * 10**6)", r"was ended: it printed more than 16\.0 MiB")
    fails("print('x' * (1 << 25))", r"was ended: it printed more than 16\.0 MiB")
    fails(f"{FORKS}\nfor _ in range(8): child(300)\ntime.sleep(60)", r"more than 1\.0 GiB of memory")
    fails(f"{FORKS}\nfor _ in range(80): child(0)\ntime.sleep(60)", "more than 64 processes and threads")
    monkeypatch.setattr(python_program, "_SECONDS", 1)
    fails("import time; time.sleep(60)", "took longer than 1 s")


FORKS = """
import os, time
def child(mib):
    if os.fork() == 0:
        kept = b"x" * (mib << 20)
        time.sleep(60)
"""

ATTACKS = """
import ctypes, fcntl, os, signal, socket, sys

libc = ctypes.CDLL(None, use_errno=True)
others, directory, key = {others}, {directory!r}, {key}

def tried(way, *args):
    try:
        result = way(*args)
    except OSError as error:
        return error.strerror
    return result if result != -1 else os.strerror(ctypes.get_errno())

for pid in others:
    print("kill", tried(os.kill, pid, 0))
    reading, writing = os.pipe()
    print("owner", tried(fcntl.fcntl, reading, fcntl.F_SETOWN, pid))
    print("open", tried(os.listdir, f"/proc/{{pid}}"))
print("shm", tried(libc.shmget, key, 1 << 20, 0o600))
print("connect", tried(socket.create_connection, ("127.0.0.1", {port})))
os.mkdir("here")
print("mount", tried(libc.mount, b"none", b"here", b"tmpfs", 0, None))
print("unshare", tried(libc.unshare, 0x10000000))
print("unshare", tried(libc.unshare, 0x20000))
print("read", tried(os.listdir, directory))
for path in ("/", "/dev", "/usr", sys.prefix, "/tmp", "/dev/shm"):
    print("write", os.access(path, os.W_OK))
"""
"""None of them does harm where there is no sandbox."""


@pytest.mark.process
@pytest.mark.usefixtures("sandbox")
def test_python_reaches_no_other_process_and_no_file(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None)
    key = 0x4D52
    segment = libc.shmget(key, 1 << 20, 0o1600)
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            given = {"others": [os.getpid(), sleeping.pid], "directory": str(tmp_path), "key": key}
            found = python(ATTACKS.format(**given, port=server.getsockname()[1])).splitlines()
            assert sleeping.poll() is None
        finally:
            libc.shmctl(segment, 0, None)
            sleeping.kill()
            sleeping.wait()
    other = ["kill No such process", "owner No such process", "open No such file or directory"]
    assert [line for line in found if line.split()[0] in ("kill", "owner", "open")] == 2 * other
    rest = [line for line in found if line.split()[0] not in ("kill", "owner", "open")]
    assert rest[:2] == ["shm No such file or directory", "connect Connection refused"]
    assert rest[2:5] == [
        "mount Operation not permitted",
        "unshare No space left on device",
        "unshare Operation not permitted",
    ]
    assert rest[5:] == ["read No such file or directory", *4 * ["write False"], *2 * ["write True"]]


BEGINS_DAEMONS = """
import ctypes, os, signal, subprocess, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        subprocess.run([sys.executable, "-I", "-c", "import time; time.sleep(600) # daemon of the tool"], env={})
    os._exit(0)
ctypes.CDLL(None).shmget(0x4D53, 1 << 20, 0o1600)
time.sleep(0.5)
print("done")
"""


@pytest.mark.process
@pytest.mark.usefixtures("sandbox")
def test_python_leaves_nothing_behind_whatever_the_program_does() -> None:
    assert python(BEGINS_DAEMONS) == "done"
    assert python(DEEP) == "deep"
    assert comes_true(lambda: not running("daemon of the tool"))
    assert ctypes.CDLL(None).shmget(0x4D53, 1 << 20, 0o600) == -1


@pytest.mark.process
@pytest.mark.usefixtures("sandbox")
def test_a_program_ends_with_the_process_that_runs_it() -> None:
    program = "import os\nos.fork()\nimport time; time.sleep(600) # program of the tool"
    code = f"from megarl.environments.python_program import python; python({program!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        # The parent, bubblewrap, its first process, the program.
        assert comes_true(lambda: len(list(python_program._tree(parent.pid))) >= 4)
        pids = [int(process.name) for process in python_program._tree(parent.pid)]
        time.sleep(0.5)
        parent.kill()
    assert comes_true(lambda: not any(map(alive, pids)))


DEEP = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\nprint('deep')"


@pytest.mark.process
def test_programs_may_run_without_a_sandbox_and_leave_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = ToolEnvironment(["python"], sandbox="none")
    observation = step(environment, action(call("python", code=DEEP), call("python", code="1 / 0")))
    told = answers(observation)
    assert told[0] == "deep"
    assert told[1].startswith("error: RuntimeError: exit status 1")
    assert not list(tmp_path.iterdir())


def test_a_sandbox_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap.cache_clear()
    with pytest.raises(ValueError, match=r"there is no program bwrap; install bubblewrap .*sandbox=none"):
        ToolEnvironment(["python"])
    assert ToolEnvironment(["python"], sandbox="none").tools
    with pytest.raises(ValueError, match="is for the tool python"):
        ToolEnvironment([], sandbox="none")
    with pytest.raises(ValueError, match="bubblewrap, none, not 'docker'"):
        ToolEnvironment(["python"], sandbox="docker")  # pyright: ignore[reportArgumentType]


@pytest.mark.process
def test_a_sandbox_whose_kernel_refuses_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    bubblewrap.cache_clear()
    with pytest.raises(ValueError, match="cannot run here: No permissions to create new namespace"):
        ToolEnvironment(["python"])


@pytest.mark.process
@pytest.mark.usefixtures("sandbox")
@pytest.mark.skipif(os.geteuid() != 0, reason="root of a container")
def test_root_needs_no_user_namespaces() -> None:
    tried = "from megarl.environments.python_program import python; print(python('import os; print(os.getpid())'))"
    forbidden = f"echo 0 > /proc/sys/user/max_user_namespaces && {sys.executable} -c {shlex.quote(tried)}"
    made = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", forbidden]
    done = subprocess.run(made, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2\n", "")


def running(text: str) -> list[int]:
    """The processes whose command lines have a text."""
    found: list[int] = []
    for directory in Path("/proc").iterdir():
        with suppress(OSError):
            if directory.name.isdigit() and text in (directory / "cmdline").read_text():
                found.append(int(directory.name))
    return found
