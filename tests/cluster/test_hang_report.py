"""What the stacks of hanging processes tell: who has not come, and who cannot answer."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.cluster.hang_report import explain, report_hang, stacks_of_other_nodes, working_frames
from megarl.cluster.session import Session
from megarl.run.attempts import AttemptLog
from megarl.stacks import ProcessStacks, answering, take_stacks, write_stacks
from tests.cluster.conftest import MakeGroup, answer_of
from tests.cluster.fakes import FakeWorker

OTHER_THREADS = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
"""


def dump(*frames: tuple[str, int, str]) -> str:
    """A process with a call whose innermost frames these are."""
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    bottom = '  File "/x/megarl/cluster/ray_worker.py", line 150 in run\n  File "/x/ray/worker.py", line 9 in main'
    return "\n".join([OTHER_THREADS, "Current thread 0x00007f0000000002 (most recent call first):", *lines, bottom])


BARRIER = (
    ("/x/torch/distributed/distributed_c10d.py", 4900, "barrier"),
    ("/x/megarl/megatron/state.py", 60, "save_role"),
)
LOSS = ("/x/megarl/megatron/losses.py", 3, "__call__"), ("/x/megarl/megatron/model_engine.py", 1, "update")
TEXTS = {"barrier": dump(*BARRIER), "loss": dump(*LOSS), "idle": OTHER_THREADS}


def found(**where: str) -> dict[str, ProcessStacks]:
    """Processes by name and what they do, or why they do not answer."""
    return {
        name: ProcessStacks(name=name, pid=1, host="h", text=TEXTS.get(what, ""), silence="" if what in TEXTS else what)
        for name, what in where.items()
    }


def test_the_frames_of_the_call_are_those_above_the_worker() -> None:
    assert working_frames(TEXTS["loss"]) == [
        '  File "/x/megarl/megatron/losses.py", line 3 in __call__',
        '  File "/x/megarl/megatron/model_engine.py", line 1 in update',
    ]
    assert working_frames(TEXTS["idle"]) == []


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (
            {"r0": "barrier", "r1": "loss", "r2": "barrier"},
            ["Not in the collective in which r0, r2 wait: r1.", "r0, the innermost", "r1, the innermost"],
        ),
        ({"r0": "loss", "r1": "idle", "r2": "loss"}, ["r1 works on no call."]),
        ({"r0": "loss", "r1": "loss"}, ["r0, the innermost"]),
        ({"r0": "barrier", "r1": "barrier"}, ["r0, the innermost"]),
        (
            {"r0": "barrier", "r1": "it is stopped"},
            ["r1 does not answer a signal: it is stopped.", "Not in the collective in which r0 waits: r1.", "r0, the"],
        ),
        ({}, ["r0 does not answer a signal: there is no such process."]),
    ],
)
def test_who_has_not_come_is_told(where: dict[str, str], expected: list[str]) -> None:
    lines = [line for line in explain(list(where) or ["r0"], found(**where)) if not line.startswith("  File")]
    assert len(lines) == len(expected)
    assert all(line.startswith(begin) for line, begin in zip(lines, expected, strict=True)), lines


def test_how_far_each_process_is_with_its_collectives_is_told() -> None:
    both, own = "ranks 0, 1: 4 collectives begun, 3 finished; in gloo:all_reduce [[4]] for 9.0 s", "ranks 0: 7 begun"
    processes = found(r0="barrier", r1="loss")
    processes["r0"] = replace(processes["r0"], waits=(own, both))
    processes["r1"] = replace(processes["r1"], waits=("ranks 0, 1: 3 collectives begun, 3 finished",))
    lines = [line for line in explain(["r0", "r1"], processes) if "collectives begun" in line]
    assert lines == [f"r0, {both}.", "r1, ranks 0, 1: 3 collectives begun, 3 finished."]


def _change() -> list[str]:
    raise RuntimeError("dictionary changed size during iteration")


def test_a_process_writes_its_own_stacks_as_often_as_it_is_asked(tmp_path: Path) -> None:
    """Also after errors in what it waits for, of which it tries RuntimeError again."""
    told = iter([lambda: ["one call"], lambda: {}["entries"], list, _change, lambda: ["two", "calls"]])
    failed = ("what it waits for cannot be told: KeyError('entries')",)
    with answering(tmp_path / "driver.log", lambda: next(told)()):
        with answering(tmp_path / "inner" / "driver.log", lambda: ["inside"]):
            (own,) = take_stacks(tmp_path / "inner")
            assert own.waits == ("inside",)
        for waits in (("one call",), failed, (), ("two", "calls")):
            (own,) = take_stacks(tmp_path)
            assert (own.name, own.pid, own.silence, own.waits) == ("driver", os.getpid(), "", waits)
            assert own.text.count("in test_a_process_writes_its_own_stacks") == 1
    assert take_stacks(tmp_path) == []
    twice = [own, ProcessStacks(name="driver", pid=7, host="h", silence="it has ended")]
    assert {file.name for file in write_stacks(twice, tmp_path).iterdir()} == {f"driver-{own.pid}.txt", "driver-7.txt"}


def test_an_event_loop_that_is_blocked_works(tmp_path: Path) -> None:
    """Beside another one that waits, as Ray's does in a process whose conversations have a loop of their own."""
    begun = threading.Event()
    ends = threading.Event()
    loops = [asyncio.new_event_loop() for _ in range(2)]

    async def block_the_loop() -> None:
        begun.set()
        ends.wait()

    threads = [threading.Thread(target=loop.run_forever) for loop in loops]
    for thread in threads:
        thread.start()
    blocked = asyncio.run_coroutine_threadsafe(block_the_loop(), loops[1])
    assert begun.wait(10)
    try:
        with answering(tmp_path / "driver.log", list):
            text = take_stacks(tmp_path)[0].text
    finally:
        ends.set()
        blocked.result(10)
        for loop, thread in zip(loops, threads, strict=True):
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
    assert working_frames(text)[-1].endswith(" in block_the_loop")


@pytest.mark.process
async def test_the_stacks_of_live_workers(session: Session, make_group: MakeGroup, tmp_path: Path) -> None:
    """The command of the user, while all ranks sleep in a call; they go on afterwards."""
    group = make_group()
    await group.call(FakeWorker.note, "awake")
    asleep = group.call(FakeWorker.note, "asleep", 3.0)
    time.sleep(0.5)
    (tmp_path / "logs").symlink_to(session._log_dir)
    told = CliRunner().invoke(app, ["stacks", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert await asleep == [0, 1, 2]
    for rank in range(3):
        assert f"train-rank-{rank} (pid " in told.output
    assert told.output.count("fakes.py") == 3
    assert "driver (pid " in told.output
    assert "\n  train rank 0, train rank 1, train rank 2 in train.note: its limit has not begun\n" in told.output
    (directory,) = (tmp_path / "logs" / "stacks").iterdir()
    assert "in note" in (directory / "train-rank-1.txt").read_text()


@pytest.mark.process
def test_other_nodes_are_asked(session: Session, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """This node counts as another one."""
    workers = make_group()
    session.run(answer_of(lambda: workers.call(FakeWorker.note, "awake")))
    monkeypatch.setattr("megarl.cluster.ray_api.node_address", lambda: "elsewhere")
    found, silent = stacks_of_other_nodes(session._log_dir)
    assert silent == []
    assert {f"train-rank-{rank}" for rank in range(3)} <= {each.name for each in found if each.text}


@pytest.mark.process
def test_a_stopped_worker_is_named(session: Session, make_group: MakeGroup) -> None:
    workers = make_group()
    pids: list[Any] = session.run(answer_of(lambda: workers.call(FakeWorker.tell, os.getpid)))
    os.kill(pids[2], signal.SIGSTOP)
    try:
        names = [process.name for process in workers.processes]
        lines = report_hang(names, session._log_dir, joined=False)
        others = report_hang(names[:2], session._log_dir, joined=False)
    finally:
        os.kill(pids[2], signal.SIGCONT)
    assert lines[0] == f"{names[2]} does not answer a signal: it is stopped, by SIGSTOP or a debugger."
    assert others[0].startswith("train-rank-2 does not answer a signal: it is stopped")
    assert lines[-1].startswith("The stacks of all processes are in ")


def test_a_run_without_processes_is_told(tmp_path: Path) -> None:
    log = AttemptLog(tmp_path / "attempts.jsonl")
    log.start(step=0)
    told = [CliRunner().invoke(app, ["stacks", str(path)]) for path in (tmp_path, tmp_path.parent)]
    log.end(4, "finished")
    told.append(CliRunner().invoke(app, ["stacks", str(tmp_path)]))
    assert [(each.exit_code, each.stdout) for each in told] == [(1, ""), (2, ""), (1, "")]
    assert f"no process of {tmp_path} runs here" in told[0].stderr
    assert "its driver is on" in told[0].stderr
    assert f"{tmp_path.parent}: no run is there" in told[1].stderr
    assert f"the run in {tmp_path} has ended" in told[2].stderr
