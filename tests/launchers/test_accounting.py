"""Jobs of a fake Slurm: following them until they end, and messages where that is impossible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nemo_run as run
import paramiko
import pytest

from launchers.experiment import AccountingError, follow, job_states
from tests.launchers.scripts import ROOT, User, user
from tests.launchers.shown import PIPELINE, SFT

pytestmark = pytest.mark.process

_SBATCH = """#!/bin/bash
echo >> "$0.calls"
echo $((4710 + $(wc -l < "$0.calls")))
"""
_SACCT = """#!/bin/bash
[[ $1 == -X ]] || exit  # NeMo-Run itself
echo "$*" >> "$0.calls"
directory=$(dirname "$0")
cat "$directory/answer-$(wc -l < "$0.calls")" 2> /dev/null && exit
cat "$directory/answer" 2> /dev/null && exit
echo "Slurm accounting storage is disabled" >&2
exit 1
"""
_IMPATIENT = """
import functools
from launchers import experiment, pipeline
from launchers.submission import run_script
experiment.follow = functools.partial(experiment.follow, pause_s=0.1, limit_s=0.3)
run_script(pipeline.main)
"""
_PYXIS = "runtime: {name: pyxis, image: /images/megarl.sqsh}\nenv: {API_KEY: a secret}\n"
NUMBERS = {"sft": "4711", "reward_model": "4712"}
DISABLED = "Slurm's accounting does not answer: sacct: Slurm accounting storage is disabled"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A directory with stand-ins for Slurm's commands; sacct gives the text of answer-N, then that of answer."""
    directory = tmp_path / "tools"
    directory.mkdir()
    for name, text in {"sbatch": _SBATCH, "sacct": _SACCT}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    return directory


@pytest.fixture
def here(tools: Path, monkeypatch: pytest.MonkeyPatch) -> run.LocalTunnel:
    """NeMo-Run's way to these commands."""
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return run.LocalTunnel(job_dir="")


def account(tools: Path) -> tuple[User, list[str]]:
    """Someone on a login node with these commands, and the options for it."""
    directory = tools.parent
    (directory / "profile.yaml").write_text(_PYXIS)
    options = ["--executor=slurm", "--profile", str(directory / "profile.yaml"), "--name=demo"]
    return user(directory, PATH=f"{tools}:/usr/bin:/bin"), options


def test_jobs_are_followed_until_they_end(
    here: run.LocalTunnel, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tools / "answer-1").write_text("4711|PENDING\n")
    (tools / "answer-2").write_text("4711|RUNNING\n4712|PENDING\n")
    (tools / "answer-4").write_text("4711|COMPLETED\n4712|NODE_FAIL\n")
    assert follow(here, NUMBERS, pause_s=0.01) == {"sft": "COMPLETED", "reward_model": "NODE_FAIL"}
    output, errors = capsys.readouterr()
    assert [line.partition(" ")[2] for line in output.splitlines()] == [
        "sft: PENDING",
        "reward_model: PENDING",
        "sft: RUNNING",
        "sft: COMPLETED",
        "reward_model: NODE_FAIL",
    ]
    assert errors == f"{DISABLED}; trying again\n"
    assert (tools / "sacct.calls").read_text() == "-X -n -P -o JobIDRaw,State -j 4711,4712\n" * 4


def test_slurm_states_are_mapped(here: run.LocalTunnel, tools: Path) -> None:
    (tools / "answer").write_text("4712|CANCELLED by 0\n")
    assert job_states(here, NUMBERS) == {"sft": "PENDING", "reward_model": "CANCELLED"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EOFError(), "EOFError"),
        (ConnectionResetError(104, "reset"), "[Errno 104] reset"),
        (paramiko.SSHException("not active"), "not active"),
        (SystemExit(1), "the login was refused"),
    ],
)
def test_a_lost_connection_is_retried_for_a_while(
    error: BaseException, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def lose(self: run.LocalTunnel, command: str, **options: bool) -> None:
        calls.append(command)
        raise error

    monkeypatch.setattr(run.LocalTunnel, "run", lose)
    message = f"Slurm's accounting cannot be reached: {said}"
    with pytest.raises(AccountingError) as raised:
        follow(run.LocalTunnel(job_dir=""), NUMBERS, pause_s=0.01, limit_s=0.1)
    assert str(raised.value) == message
    assert capsys.readouterr() == ("", f"{message}; trying again\n")
    assert len(calls) > 2


def test_an_experiment_ends_with_its_jobs_status_and_is_private_to_its_user(tools: Path) -> None:
    caller, options = account(tools)
    (tools / "answer").write_text("4711|COMPLETED\n4712|COMPLETED\n")
    done = caller.call(*PIPELINE, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reward_model: COMPLETED" in done.stdout
    (script,) = caller.directory.glob("home/experiments/demo/*/sft_sbatch.sh")
    assert "export API_KEY='a secret'" in script.read_text()
    assert caller.readable == []
    (tools / "sbatch.calls").unlink()
    (tools / "answer").write_text("4711|OUT_OF_MEMORY\n4712|CANCELLED by 0\n")
    done = caller.call(*PIPELINE, *options)
    assert done.returncode == 1
    assert "sft: OUT_OF_MEMORY; " in done.stderr
    assert "reward_model: CANCELLED; " in done.stderr


def test_without_accounting_the_jobs_are_named_and_not_followed(tools: Path) -> None:
    caller, options = account(tools)
    command = [sys.executable, "-c", _IMPATIENT, *PIPELINE[1:], *options]
    done = subprocess.run(
        command, cwd=ROOT, env=caller.environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 1
    directories = [ROOT / "runs" / name for name in ("debug-sft", "debug-reward-model")]
    assert done.stderr.splitlines()[-4:] == [
        f"{DISABLED}; trying again",
        DISABLED,
        "the jobs continue without this script: 4711,4712",
        f"squeue --jobs 4711,4712 and megarl status {directories[0]} {directories[1]} show them; "
        "where Slurm has no accounting, submit with --detach",
    ]


def test_an_unreachable_login_node_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(
        _PYXIS + "nemo_run: {tunnel: {host: nowhere.invalid, user: me, job_dir: /d, directory: /w}}\n"
    )
    options = ("--executor=slurm", "--profile", str(tmp_path / "profile.yaml"), "--name=demo")
    done = user(tmp_path, Path(sys.executable)).call(*SFT, *options)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("submitting from me@nowhere.invalid failed: ")
