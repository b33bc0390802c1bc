"""Jobs of a fake Slurm: waiting until they end, and messages where they cannot be submitted."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launchers.scripts import User, user
from tests.launchers.shown import PIPELINE, SFT
from tests.leftovers import comes_true

pytestmark = pytest.mark.process

_SBATCH = """#!/bin/bash
echo >> "$0.calls"
echo $((4710 + $(wc -l < "$0.calls")))
"""
_SACCT = """#!/bin/bash
echo "JobID|JobName|State"
cat "$(dirname "$0")/answer"
"""
_PYXIS = "runtime: {name: pyxis, image: /images/megarl.sqsh}\nenv: {API_KEY: a secret}\n"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A directory with stand-ins for Slurm's commands; sacct gives the text of `answer`."""
    directory = tmp_path / "tools"
    directory.mkdir()
    for name, text in {"sbatch": _SBATCH, "sacct": _SACCT}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    return directory


def account(tools: Path) -> tuple[User, list[str]]:
    """Someone on a login node with these commands, and the options for it."""
    directory = tools.parent
    (directory / "profile.yaml").write_text(_PYXIS)
    options = ["--executor=slurm", "--profile", str(directory / "profile.yaml"), "--name=demo"]
    return user(directory, PATH=f"{tools}:/usr/bin:/bin"), options


def states(tools: Path, sft: str, reward_model: str) -> None:
    """Sets the states of the two jobs in the accounting."""
    (tools / "answer").write_text(f"4711|demo.sft|{sft}\n4712|demo.reward_model|{reward_model}\n")


def test_an_experiment_ends_with_its_jobs_and_is_private_to_its_user(tools: Path) -> None:
    caller, options = account(tools)
    states(tools, "COMPLETED", "COMPLETED")
    done = caller.call(*PIPELINE, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    (script,) = caller.directory.glob("home/experiments/demo/*/sft_sbatch.sh")
    assert "export API_KEY='a secret'" in script.read_text()
    assert caller.readable == []


def test_failed_jobs_are_named(tools: Path) -> None:
    caller, options = account(tools)
    states(tools, "OUT_OF_MEMORY", "CANCELLED by 0")
    done = caller.call(*PIPELINE, *options)
    assert done.returncode == 1
    assert "sft: FAILED; " in done.stderr
    assert "reward_model: CANCELLED; " in done.stderr


def test_detached_jobs_are_not_waited_for(tools: Path) -> None:
    caller, options = account(tools)
    states(tools, "RUNNING", "PENDING")
    done = caller.call(*PIPELINE, "--detach", *options)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_interrupt_leaves_the_jobs(tools: Path) -> None:
    caller, options = account(tools)
    states(tools, "RUNNING", "PENDING")
    process = caller.start(*PIPELINE, *options)
    calls = tools / "sbatch.calls"
    assert comes_true(lambda: calls.exists() and len(calls.read_text()) == 2, 120)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "the jobs continue" in errors


def test_an_unreachable_login_node_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(
        _PYXIS + "nemo_run: {tunnel: {host: nowhere.invalid, user: me, job_dir: /d, directory: /w}}\n"
    )
    options = ("--executor=slurm", "--profile", str(tmp_path / "profile.yaml"), "--name=demo")
    done = user(tmp_path, Path(sys.executable)).call(*SFT, *options)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("submitting from me@nowhere.invalid failed: ")
