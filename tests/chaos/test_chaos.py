"""Seeded faults in runs of every stage: each run ends exactly, or with one clear error, and resumes to the exact end.

``make chaos`` takes 100 trials. The number alone determines a trial: stage, fault, victim and step. How far the step is
when the fault hits depends on the machine. Four more faults hit the environments of conversations, and seven hit two
runs for continuous integration.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples.sort_letters.checkpoint import write_checkpoint
from megarl.run.attempts import read_attempts
from megarl.run.paths import RunPaths
from tests.disk import SmallDisk
from tests.e2e.runs import Finished, finish, lines, started
from tests.e2e.test_asynchronous import SETTINGS, TIMES
from tests.e2e.test_endings import process_that_prints_to
from tests.leftovers import Trace, comes_true

TRIALS = int(os.environ.get("CHAOS_TRIALS", "1"))
LIMITS = {"start": 90, "scoring": 70, "rollout": 40, "inference": 40, "update": 40, "sync": 40, "checkpoint": 40}
COMMON = ["checkpoint.every=1", *(f"cluster.time_limits.{phase}={limit}" for phase, limit in LIMITS.items())]
TWO = ["cluster.devices_per_node=2", "groups.train.devices=0-1"]
STAGES = {
    "sft": ("sft", [*TWO, "groups.train.roles.actor={tp: 1, pp: 2}"]),
    "reward_model": ("reward_model", [*TWO, "normalisation=null", "rollout=null"]),
    "raft": ("raft", [*TWO, "groups.train.roles.actor={tp: 2, pp: 1}", "run.steps=3"]),
    "ppo": ("grpo", [*TWO, "run.steps=3"]),
    "asynchronous ppo": ("grpo", [*SETTINGS, "rollout.devices=1-2", "rollout.max_replacements=1"]),
}
"""The file in configs/debug, and the settings."""
SHORT = [f"cluster.time_limits.{phase}=20" for phase in ("update", "checkpoint")]
LONG_RUN = {"several faults": ("sft", [*TWO, "groups.train.roles.actor={tp: 2, pp: 1}", "run.steps=24", *SHORT])}
CONVERSATIONS = {
    "conversations": (
        "grpo",
        [
            *TWO,
            "run.steps=3",
            "data={prompts: null, tasks: 24, prompts_per_step: 4, samples_per_prompt: 4}",
            "environment={name: 'tests.conversations.worlds:Letters', args: {turns: 4}, time_limit: 5}",
            "rollout.max_new_tokens=6",
            "reward.functions=[{name: soft_overlong, args: {max_tokens: 6, buffer_tokens: 6}}]",
            f"rollout.stop_token_ids={[*range(3, 50)]}",
            "evaluation=null",
        ],
    )
}
OF_CHILD = "child of "
SURVIVED = ("delay", "kill", "starve", "stop")
ENDING = ("SIGTERM", "damage", "full disk")
BLOWS = {
    "kill": [(signal.SIGKILL, 0.0)],
    "stop": [(signal.SIGSTOP, 0.0)],
    "delay": [(signal.SIGSTOP, 5.0), (signal.SIGCONT, 0.0)],
    "starve": [(signal.SIGSTOP, 0.3), (signal.SIGCONT, 0.03)] * 30,
    "SIGTERM": [(signal.SIGTERM, 0.0)],
    "SIGUSR1": [(signal.SIGUSR1, 0.0)],
    "damage": [(signal.SIGKILL, 0.0)],
}
"""The signals of each kind of fault, with seconds after them; a checkpoint is damaged when the driver is dead."""
KINDS = (*BLOWS, "kill", "full disk", "full disk")
DISK_KIB = 96 << 10
RAY = {"raylet": "/raylet/raylet ", "gcs": "/gcs/gcs_server "}
"""Parts of the command lines of Ray's processes."""

pytestmark = pytest.mark.e2e


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens in a trial.

    Args:
        victim: a log file of the run's processes, the driver, or one of Ray's processes.
        restarts: `run.max_restarts`.
        step: the fault hits after so many steps,
        share: and this share of the time until the next one, or until the end.
        left_kib: of a disk that becomes full.
    """

    stage: str
    kind: str
    victim: str
    restarts: int
    step: int
    share: float
    left_kib: int

    @classmethod
    def draw(cls, chance: random.Random, straight: Callable[[str], Path]) -> Fault:
        stage, kind = chance.choice(sorted(STAGES)), chance.choice(KINDS)
        done = straight(stage)
        victims = [path.name for path in sorted((done / "logs").glob("*.log")) if path.name != "driver.log"]
        if kind != "stop":  # nothing monitors the driver: stopped, it waits for its user
            victims.append("driver")
        if kind == "kill":
            victims += RAY
        steps = len(lines(done / "metrics.jsonl"))
        return cls(
            stage=stage,
            kind=kind,
            victim=chance.choice(victims) if kind in ("kill", "stop", "delay", "starve") else "driver",
            restarts=chance.choice([0, 1]),
            step=chance.randrange(2 if kind == "damage" else 0, steps + 1),
            share=chance.random(),
            left_kib=chance.choice([0, 4, 64, 4096]),
        )

    def is_survived(self) -> bool:
        """Whether the run must go on by itself."""
        harmless = self.kind in ("delay", "starve")
        return harmless or (self.restarts > 0 and self.kind in ("kill", "stop") and self.victim.endswith(".log"))

    def wait(self, directory: Path, straight: Path, program: subprocess.Popen[str]) -> None:
        """Returns when the fault is due, or the run has ended."""
        begin, *_, end = lines(straight / "attempts.jsonl")
        times = [begin["time"], *(line["time/written"] for line in lines(straight / "metrics.jsonl")), end["time"]]
        metrics = directory / "metrics.jsonl"
        while program.poll() is None and self.step > (metrics.read_bytes().count(b"\n") if metrics.exists() else 0):
            time.sleep(0.05)
        time.sleep(self.share * (times[self.step + 1] - times[self.step]))

    def strike(self, program: subprocess.Popen[str], trace: Trace, directory: Path) -> None:
        """Sends the signals, as soon as the victim lives."""
        while not (pid := program.pid if self.victim == "driver" else self._find(trace, directory)):
            if program.poll() is not None:
                return
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            for number, pause_s in BLOWS[self.kind]:
                os.kill(pid, number)
                time.sleep(pause_s)

    def _find(self, trace: Trace, directory: Path) -> int | None:
        with suppress(AssertionError, OSError):
            if self.victim not in RAY:
                parent = process_that_prints_to(directory / "logs" / self.victim.removeprefix(OF_CHILD))
                if not self.victim.startswith(OF_CHILD):
                    return parent
                children = Path(f"/proc/{parent}/task").glob("*/children")
                return next((int(pid) for file in children for pid in file.read_text().split()), None)
            for pid in trace.pids():
                if RAY[self.victim] in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                    return pid
        return None


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the directory of an undisturbed run of a stage."""

    @cache
    def run_of(stage: str) -> Path:
        directory = tmp_path_factory.mktemp("straight") / stage.replace(" ", "-")
        finished = run(stage, directory)
        assert finished.status == 0, finished.errors
        finished.assert_clean()
        return directory

    return run_of


def command(stage: str, directory: Path, *settings: str) -> list[str]:
    config, own = {**STAGES, **LONG_RUN, **CONVERSATIONS}[stage]
    if stage in CONVERSATIONS:
        own = [*own, f"model={{random: null, vocab_size: null, path: {model_with_letters()}}}"]
    return ["train", f"configs/debug/{config}.yaml", f"run.dir={directory}", *own, *COMMON, *settings]


@cache
def model_with_letters() -> Path:
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_checkpoint(directory, 0)
    return directory


def run(stage: str, directory: Path, *settings: str) -> Finished:
    with started(command(stage, directory, *settings)) as program:
        return finish(*program)


@pytest.mark.matrix
@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_disturbed_run_ends_exactly_or_resumes_to_the_exact_end(
    straight: Callable[[str], Path], tmp_path: Path, trial: int
) -> None:
    chance = random.Random(trial)
    fault = Fault.draw(chance, straight)
    disk = SmallDisk(tmp_path / "disk", DISK_KIB) if fault.kind == "full disk" else None
    with disk or nullcontext():
        directory = (disk.path if disk else tmp_path) / "run"
        with started(command(fault.stage, directory, f"run.max_restarts={fault.restarts}")) as program:
            fault.wait(directory, straight(fault.stage), program[0])
            finished = struck(fault, program, directory, disk)
        print(f"trial {trial}: {fault}: exit code {finished.status}, {finished.errors.splitlines()[:1]}")
        if finished.status:
            assert not fault.is_survived(), finished.errors
            repair(fault, finished, directory, chance, disk)
            resumed = run(fault.stage, directory)
            assert resumed.status == 0, resumed.errors
            resumed.assert_clean()
        assert_whole(directory, straight(fault.stage))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["kill", "stop"])
@pytest.mark.parametrize("victim", ["", OF_CHILD], ids=["process", "child"])
def test_conversations_survive_the_loss_of_their_environments(
    straight: Callable[[str], Path], tmp_path: Path, victim: str, kind: str
) -> None:
    """A lost process restarts the run; a lost child is replaced, and its conversations begin anew."""
    directory, whole = tmp_path / "run", straight("conversations")
    with started(command("conversations", directory, "run.max_restarts=1")) as program:
        wait_for_progress(directory, program[0], 0, whole, random.Random(f"{victim}{kind}").random())
        fault = blow(kind, f"{victim}environments-0.log", "conversations")
        assert fault._find(program[1], directory), f"there is no {fault.victim}"
        finished = struck(fault, program, directory, None)
    assert finished.status == 0, finished.errors
    assert len(read_attempts(directory / "attempts.jsonl")) == (1 if victim else 2)
    assert_whole(directory, whole)


@pytest.mark.matrix
def test_a_run_survives_four_faults(straight: Callable[[str], Path], tmp_path: Path) -> None:
    chance = random.Random(0)
    directory = tmp_path / "run"
    restarts = 0
    whole = straight("several faults")
    with started(command("several faults", directory, "run.max_restarts=9")) as program:
        for kind in chance.sample(SURVIVED, len(SURVIVED)):
            wait_for_progress(directory, program[0], restarts, whole, chance.random())
            blow(kind, f"train-rank-{chance.randrange(2)}.log").strike(*program[:2], directory)
            restarts += kind in ("kill", "stop")
        finished = finish(*program)
    assert finished.status == 0, finished.errors
    finished.assert_clean()
    assert len(read_attempts(directory / "attempts.jsonl")) == 1 + restarts
    assert_whole(directory, whole)
    stacks = [file.read_text() for file in directory.glob("logs/stacks/*/train-rank-*.txt")]
    assert any(" collectives begun, " in text for text in stacks), stacks


@pytest.mark.matrix
def test_a_run_that_three_faults_end_resumes_each_time(straight: Callable[[str], Path], tmp_path: Path) -> None:
    """One is the damaged checkpoint of a killed driver."""
    chance = random.Random(1)
    directory = tmp_path / "disk" / "run"
    whole = straight("several faults")
    with SmallDisk(tmp_path / "disk", DISK_KIB) as disk:
        for attempts, kind in enumerate(chance.sample(ENDING, len(ENDING))):
            fault = blow(kind, "driver")
            with started(command("several faults", directory)) as program:
                wait_for_progress(directory, program[0], attempts, whole, chance.random())
                finished = struck(fault, program, directory, disk if kind == "full disk" else None)
            assert finished.status, f"{kind} came too late"
            repair(fault, finished, directory, chance, disk)
        resumed = run("several faults", directory)
        assert resumed.status == 0, resumed.errors
        resumed.assert_clean()
        assert_whole(directory, whole)


def blow(kind: str, victim: str, stage: str = "several faults") -> Fault:
    """A fault that hits at once."""
    return Fault(stage=stage, kind=kind, victim=victim, restarts=0, step=0, share=0.0, left_kib=0)


def wait_for_progress(
    directory: Path, program: subprocess.Popen[str], attempts: int, straight: Path, share: float
) -> None:
    """Returns when the attempt after so many others has gone further than all of them, and a share of a step later."""

    def has_gone_further() -> bool:
        if program.poll() is not None:
            return True
        *others, last = [None, *read_attempts(directory / "attempts.jsonl")]
        if last is None or len(others) <= attempts:
            return False
        reached = max([last.step, *(each.end.step for each in others if each is not None and each.end is not None)])
        metrics = directory / "metrics.jsonl"
        return metrics.exists() and any(line["step"] > reached for line in lines(metrics))

    assert comes_true(has_gone_further, 200)
    assert program.poll() is None, program.communicate()
    written = [line["time/written"] for line in lines(straight / "metrics.jsonl")]
    time.sleep(share * (written[-1] - written[0]) / len(written))


def struck(
    fault: Fault, program: tuple[subprocess.Popen[str], Trace, Path], directory: Path, disk: SmallDisk | None
) -> Finished:
    """Lets a fault hit a run, waits for the end of the run, and asserts that it leaves nothing behind."""
    if disk:
        disk.fill(fault.left_kib)
    else:
        fault.strike(*program[:2], directory)
    finished = finish(*program)
    if finished.status == -signal.SIGKILL:
        gone = comes_true(lambda: not program[1].processes() and not os.listdir(program[2]))
        assert gone, (program[1].processes(), os.listdir(program[2]))
        assert not program[1].shared_memory()
    else:
        finished.assert_clean()
    return finished


def repair(fault: Fault, finished: Finished, directory: Path, chance: random.Random, disk: SmallDisk | None) -> None:
    """Asserts that a run has ended as expected, and does what its user would do before the next start."""
    assert_expected(fault, finished)
    if fault.kind == "full disk":
        assert disk
        (disk.path / "filling").unlink()
    if fault.kind == "damage":
        remove_damaged(fault, directory, chance)


def assert_whole(directory: Path, straight: Path) -> None:
    """Asserts that a run has the content of the undisturbed one, and no unfinished files."""
    assert content(directory) == content(straight)
    unfinished = (".partial", ".staged", ".removed")
    assert not [path for path in directory.rglob("*") if path.name.endswith(unfinished)]


def assert_expected(fault: Fault, finished: Finished) -> None:
    """The exit code is one of the fault, and the first line of the errors says what happened."""
    if fault.kind in (
        "SIGTERM",
        "SIGUSR1",
    ):  # before its first step a run ends at once, and during the imports without a word
        assert finished.status in (os.EX_TEMPFAIL, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGUSR1), finished
        return
    if fault.victim == "driver" and fault.kind != "full disk":
        assert finished.status == -signal.SIGKILL, finished.errors
        return
    assert finished.status in (1, 2), finished.errors
    assert finished.errors.strip()
    assert "Traceback" not in finished.errors.splitlines()[0], finished.errors


def remove_damaged(fault: Fault, directory: Path, chance: random.Random) -> None:
    """Damages a file of the latest checkpoint, and removes the checkpoint as the run's refusal to resume says."""
    newest = max((directory / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]), default=None)
    if newest is None:
        return
    file = chance.choice(sorted(newest.glob(chance.choice(["manifest.json", "state.json", "*/*"]))))
    data, at = bytearray(file.read_bytes()), chance.randrange(file.stat().st_size)
    data[at] ^= 1 << chance.randrange(8)
    deed = chance.choice(["deleted", "truncated", "altered"])
    print(f"{file.relative_to(directory)} is {deed} at byte {at}")
    if deed == "deleted":
        file.unlink()
    else:
        file.write_bytes(data[:at] if deed == "truncated" else data)
    refused = run(fault.stage, directory)
    assert refused.status == 2, refused.errors
    assert "Traceback" not in refused.errors
    assert file.name in refused.errors
    found = re.search(r"remove (\S+) to resume", refused.errors)
    assert found, refused.errors
    assert Path(found[1]) == newest
    shutil.rmtree(found[1])


def content(directory: Path) -> dict[str, Any]:
    """The lines of the run's files except times and placement, and the files of its export."""
    told = {
        path.name: [{name: v for name, v in line.items() if not name.startswith(TIMES)} for line in lines(path)]
        for path in RunPaths(directory).line_files
        if path.exists()
    }
    return told | {path.name: path.read_bytes() for path in sorted((directory / "export").iterdir())}
