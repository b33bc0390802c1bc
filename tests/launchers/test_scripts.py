"""Submissions and refusals of the scripts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from megarl.launch.profile import SSH, Profile
from tests.debian import program
from tests.launchers.scripts import ROOT, torch_free, user
from tests.launchers.shown import GOLDEN, PIPELINE, SFT, SHOWN
from tests.needs import lacking

pytestmark = pytest.mark.process

FILES = sorted(GOLDEN.glob("*.txt"))


@pytest.mark.parametrize("name", SHOWN)
def test_dry_run_output_equals_the_golden_files(name: str) -> None:
    golden = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert SHOWN[name].output() == golden, "python -m tests.launchers.shown writes the files anew; read them then"


def test_every_golden_file_has_a_case() -> None:
    assert {file.stem for file in FILES} == set(SHOWN)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scripts_pass_shell_parsing_and_shellcheck(file: Path, tmp_path: Path) -> None:
    shellcheck = program("shellcheck")
    if shellcheck is None:
        lacking("no shellcheck on this machine: make slurm installs it")
    names_and_scripts = re.split(r"^# ---- (\S+).*\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    for name, text in zip(names_and_scripts[::2], names_and_scripts[1::2], strict=True):
        script = tmp_path / Path(name).name
        script.write_text(text, encoding="utf-8")
        ours = name.endswith(f"{script.stem}.sh") and "/scripts/" in name
        critic = [[shellcheck, str(script)]] if ours else []
        for command in (["bash", "-n", str(script)], *critic):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_secret_is_made_where_shell_tracing_is_off(file: Path) -> None:
    for script in file.read_text(encoding="utf-8").split("# ---- ")[1:]:
        lines = [line.strip() for line in script.splitlines()]
        if "_sbatch.sh" in lines[0]:
            assert lines.index("{ set +vx; } 2> /dev/null") < lines.index("export RAY_AUTH_TOKEN")
            assert lines.count("set -evx") == 1


def test_the_page_documents_every_option_and_a_valid_profile() -> None:
    page = (ROOT / "docs" / "nemo_run.md").read_text(encoding="utf-8")
    from launchers import pipeline  # NeMo-Run takes a second to import, for which `make unit` does not wait

    command = typer.main.get_command(pipeline.app)
    names = {str(parameter.name) for parameter in command.params} - {"arguments"}
    assert len(names) > 8
    assert not [name for name in names if f"--{name.replace('_', '-')}" not in page]
    (profile,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    tunnel = Profile.model_validate(yaml.safe_load(profile)).nemo_run.tunnel
    assert isinstance(tunnel, SSH)
    assert tunnel.directory == "/shared/me/megarl"


def test_the_first_command_on_the_page_works(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "nemo_run.md").read_text(encoding="utf-8")
    ((script, arguments),) = re.findall(r"^ +\S+/python -m launchers\.(\S+) (.*)$", page, flags=re.MULTILINE)
    done = user(tmp_path, torch_free()).call(script, *arguments.split(), f"run.dir={tmp_path / 'run'}", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert ".venv/bin/python -m megarl train" in done.stdout


def refused(directory: Path, script: str, *arguments: str, python: Path = Path(sys.executable)) -> str:
    """The message of a refused call, which leaves no files."""
    before = sorted(directory.rglob("*"))
    done = user(directory, python).call(script, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert sorted(directory.rglob("*")) == before
    return done.stderr


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text("partitions: batch\n")
    said = refused(
        tmp_path,
        *PIPELINE[:2],
        *("nothing.yaml", "run.steps=0", "--detach", "--time=1:00:00", "--name=a b"),
        *("--profile", str(tmp_path / "profile.yaml")),
    )
    for field in ("--detach = given", "--time = 1:00:00", "--name = 'a b'", "partitions = batch", "run.steps = 0"):
        assert f"  {field}\n" in said
    assert "config file = nothing.yaml" in said


def test_a_single_run_takes_one_configuration(tmp_path: Path) -> None:
    said = refused(tmp_path, *SFT, SFT[1], f"run.dir={tmp_path / 'run'}")
    assert said.count("rule: ") == 1
    assert f"CONFIG = {SFT[1]} {SFT[1]}" in said
    assert "launchers.pipeline" in said


@pytest.mark.parametrize("executor", ["local", "slurm"])
def test_an_unwritable_directory_is_refused(tmp_path: Path, executor: str) -> None:
    said = refused(tmp_path, *SFT, "run.dir=/proc/run", f"--executor={executor}", "--dry-run")
    assert "  run.dir = /proc/run\n    rule: can be written (" in said


def test_an_interpreter_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    said = refused(tmp_path, *SFT, "--python=/nowhere/python", "--detach")
    assert "  --detach = given\n" in said
    assert "  --python = /nowhere/python\n    rule: an interpreter that can run megarl; it cannot be started" in said


def test_a_missing_nemo_run_is_reported() -> None:
    command = [sys.executable, "-S", "-m", "launchers.ppo", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "make nemo-run" in done.stderr


def test_an_interpreter_without_torch_is_refused(tmp_path: Path) -> None:
    said = refused(tmp_path, *SFT, "--executor=slurm", "--dry-run", python=torch_free())
    assert f"--python = {torch_free()}\n    rule: an interpreter that can run megarl; it has no torch" in said
