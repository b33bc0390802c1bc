"""However a session ends, it leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megarl.cluster import ray_api
from megarl.cluster.cleanup import MARK, marked_processes
from megarl.cluster.driver_environment import interrupts_raise, no_interrupt_is_lost, temporary_directory
from megarl.cluster.ray_worker import RayWorker
from megarl.cluster.session import Session
from megarl.errors import RunError
from tests.leftovers import Trace, comes_true

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
_GUARD_LIMIT_S = 15.0  # five seconds of grace, and then some on a busy machine


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A temporary directory whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


_IMPORTS = """
import os, ray, signal, sys, time
from functools import partial
from pathlib import Path
from megarl.cluster.cleanup import MARK, marked_processes
from megarl.cluster.session import Session
from megarl.config import load
from megarl.groups.trainers import launch_group
from tests.cluster.conftest import DEBUG, TWO, answer_of
from tests.cluster.fakes import FakeWorker
"""
_LITTER = """
# A shell starts its background jobs with SIGINT ignored, and the tests may run in one.
signal.signal(signal.SIGINT, signal.default_int_handler)
config = load(DEBUG, TWO)
with Session(config.cluster, Path(sys.argv[1]) / "logs") as session:
    group = launch_group(session, config, "train", FakeWorker)
    print(*session.run(answer_of(lambda: group.call(FakeWorker.litter))), flush=True)
    time.sleep(120)
"""


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.matrix), signal.SIGKILL])
def test_nothing_is_left(number: int, short_directory: Path) -> None:
    """SIGTERM, and endings that come from within, are cases of test_endings.py."""
    trace = Trace()
    command = [sys.executable, "-c", _IMPORTS + _LITTER, str(short_directory)]
    environment = {**trace.environment(), "TMPDIR": str(short_directory)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None
            names = program.stdout.readline().split()
            # A new program's command line is visible a moment after its parent continues.
            assert comes_true(lambda: sum("sleep 600" in line for line in trace.processes()) == 2)
            assert len(set(names) & set(os.listdir("/dev/shm"))) == 2
            program.send_signal(number)
            if number == signal.SIGKILL:  # the guard alone cleans up
                assert comes_true(lambda: not trace.processes(), _GUARD_LIMIT_S)
            _, errors = program.communicate(timeout=120)
        finally:
            program.terminate()
    assert len(names) == 2, errors
    assert program.returncode == -number, errors
    assert not trace.processes()
    assert not set(names) & set(os.listdir("/dev/shm"))
    assert [path.name for path in short_directory.iterdir()] == ["logs"]


@pytest.mark.usefixtures("session")
def test_ray_has_no_processes_that_do_nothing() -> None:
    node: Any = ray._private.worker._global_node  # pyright: ignore[reportAttributeAccessIssue]
    assert set(node.all_processes) == {"gcs_server", "raylet"}
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked_processes(os.environ[MARK])]
    assert not any(b"DashboardAgent" in command for command in commands)


@pytest.mark.usefixtures("group")
def test_no_other_user_enters_a_directory_of_a_session() -> None:
    directory = Path(os.environ["TMPDIR"])
    directories = [Path(found) for found, _, _ in os.walk(directory)]
    assert {"sockets", "logs"} <= {found.name for found in directories}
    open_to_others = {found for found in directories if found.stat().st_mode & 0o077}
    for found in directories:
        above = [found, *found.parents]
        assert not open_to_others.issuperset(above[: above.index(directory) + 1]), found
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_session_removes_a_tree_that_is_deeper_than_python_can_recurse() -> None:
    before = os.getcwd()
    with temporary_directory() as directory:
        os.chdir(directory)
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        os.chdir(before)
    assert not Path(directory).exists()


@pytest.mark.matrix
def test_rays_head_does_not_grow_with_the_calls(session: Session) -> None:
    """By 3.2 kB a call with the history of Ray's tasks: 8 MB here."""
    node: Any = ray._private.worker._global_node  # pyright: ignore[reportAttributeAccessIssue]
    head = node.all_processes["gcs_server"][0].process.pid
    actor = session.launch("a worker", partial(SimpleNamespace, step=int), [0]).actor

    def resident_mib() -> float:
        pages = int(Path(f"/proc/{head}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 2**20

    def call(times: int) -> None:
        for _ in range(times):
            ray.get([actor.run.remote("step", (), {}) for _ in range(100)])
        time.sleep(2.5)  # workers would report every second

    call(1)
    before = resident_mib()
    call(25)
    assert resident_mib() - before < 2


def run_program(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _IMPORTS + program, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240, check=False
    )


_CLUSTER = """
import ray, sys
context = ray.init(num_cpus=0, resources={"device": 2}, include_dashboard=False, object_store_memory=80 << 20,
                   logging_level="ERROR", log_to_driver=False, _temp_dir=sys.argv[1])
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
_JOIN = """
config = load(DEBUG, [*TWO, f"cluster.address={sys.argv[1]}"])
for _ in range(2):
    with Session(config.cluster, Path(sys.argv[2])) as session:
        group = launch_group(session, config, "train", FakeWorker)
        print(*session.run(answer_of(lambda: group.call(FakeWorker.note, "here"))))
        print(ray.get(session.launch("place", partial(Path, "."), [0]).actor.run.remote("absolute", (), {})).result)
"""


_LOSE = """
config = load(DEBUG, TWO)

async def lose():
    await group.call(FakeWorker.note, "here")
    asleep = group.call(FakeWorker.note, "asleep", 60.0)
    for pid in marked_processes(os.environ[MARK]):
        if b"ray::RuntimeEnvAgent" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    await asleep

with Session(config.cluster, Path(sys.argv[1])) as session:
    group = launch_group(session, config, "train", FakeWorker)
    session.run(lose())
"""


def test_the_loss_of_rays_own_processes_is_named(short_directory: Path) -> None:
    """A raylet ends with its agent, and ends its actors; none of them is at fault."""
    lost = run_program(_LOSE, short_directory / "logs")
    told = lost.stderr.rpartition("WorkerError: ")[2]
    assert told.startswith("Ray's raylet on this machine ended, and with it the run's processes; ")
    assert "It was in train.note." in told
    assert "died" not in told


def test_a_running_cluster_is_joined_and_left_running(short_directory: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CLUSTER, str(short_directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        cwd=short_directory,
    ) as cluster:
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        joined = run_program(_JOIN, address, short_directory / "logs", RAY_AUTH_MODE="disabled")
        cluster.communicate("")
    assert joined.stdout.split() == ["0", "1", str(ROOT)] * 2, joined.stderr


@pytest.mark.parametrize(("log", "place", "named"), [("gone", ".", "run.dir"), (".", "gone", "the driver's directory")])
def test_a_node_without_the_shared_files_is_reported(tmp_path: Path, log: str, place: str, named: str) -> None:
    with pytest.raises(RunError, match=f"does not see {tmp_path}/gone: {named} must be on a file system that all"):
        RayWorker(
            "pathlib:Path",
            (),
            {},
            directory=str(tmp_path / place),
            env={},
            local_devices=None,
            log_file=str(tmp_path / log / "here.log"),
        )


_TOO_LARGE = """
from megarl.config.schema import Cluster
from megarl.errors import RunError
try:
    with Session(Cluster(devices_per_node=1, object_store_mib=10**8), Path(sys.argv[1])):
        print("started")
except RunError as error:
    print(error)
"""


def test_a_failed_start_of_ray_reports_the_reason_and_leaves_nothing(short_directory: Path) -> None:
    failed = run_program(_TOO_LARGE, short_directory / "logs", TMPDIR=str(short_directory))
    assert failed.returncode == 0, failed.stderr
    assert failed.stdout.startswith("Ray did not start on this machine: ")
    assert "object_store_memory" in failed.stdout
    assert [path.name for path in short_directory.iterdir()] == ["logs"]


@dataclass
class _Signalling:
    number: int

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_during_a_destructor_ends_the_start(number: int, error: type[BaseException], replaced: bool) -> None:
    def start() -> None:
        if replaced:  # as ray.init does
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        _Signalling(number)
        gc.collect()  # the destructor has run, and with it the handler

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error) as raised, interrupts_raise(), no_interrupt_is_lost():
            start()
        with interrupts_raise(), no_interrupt_is_lost():
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert number == signal.SIGINT or raised.value.args == (128 + signal.SIGTERM,)


def test_sigterm_keeps_its_handler_when_ray_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's core sets the default action before the processes are killed."""
    seen: list[Any] = []
    node = SimpleNamespace(kill_all_processes=lambda **_: seen.append(signal.getsignal(signal.SIGTERM)))

    def shutdown() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        node.kill_all_processes(check_alive=False)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    private = SimpleNamespace(worker=SimpleNamespace(_global_node=node))
    monkeypatch.setattr(ray_api, "untyped", SimpleNamespace(shutdown=shutdown, _private=private))
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        handler = signal.getsignal(signal.SIGTERM)
        ray_api.shutdown()
        assert [*seen, signal.getsignal(signal.SIGTERM)] == [handler, handler]
    finally:
        signal.signal(signal.SIGTERM, before)
