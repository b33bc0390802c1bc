"""Requests that cannot be submitted: all mistakes are reported together, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.slurm_command import Login, finish

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus-per-node", "4"], ["--gpus-per-node = 4", "virtual ones of the CPU"]),
        (["--nodes", "3"], ["cluster.nodes = 3", "1, 2 (from 0) has none", "set --nodes 1"]),
        (["cluster.address=10.0.0.1:6379"], ["cluster.address = 10.0.0.1:6379", "starts a Ray of its own"]),
        (["--set=runtime=apptainer"], ["runtime.image = (missing)"]),
        (["--set=runtime={name: pyxis, image: i}", "run.dir=/tmp/a,b"], ["run.dir = /tmp/a,b", "pyxis can mount"]),
        (["run.dir=/tmp/a\\b"], ["run.dir = ", "without backslashes"]),
        (["--set=sbatch=[--nodes=4]"], ["sbatch = [--nodes=4]", "give --nodes on the command line"]),
        (["--set=nemo_run.tunnel=x"], ["nemo_run.tunnel = x"]),
        (["--set=qos"], ["'qos' is not FIELD=VALUE"]),
        (["--set=runtime=bare", "--set=runtime.python=p"], ["below a field that is set to a value"]),
        (["--job-name", "a\nb"], ["--job-name = 'a\\nb'"]),
        (["run.stepz=3"], ["run.stepz = 3", "did you mean run.steps?"]),
        (["--partition", ""], ["partition = ", "a line of text"]),
        (["run.dir=~/runs/x"], ["run.dir = ~/runs/x", "~ is not read as a home directory"]),
        (["--python=~/v/bin/python"], ["runtime.python = ~/v/bin/python", "a path in full"]),
        (["--profile", "nowhere.yaml"], ["profile = nowhere.yaml", "No such file"]),
        (["run.dir=/proc/none"], ["run.dir = /proc/none", "can be written (No such file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else None,
)
def test_mistakes_are_reported(login: Login, arguments: list[str], said: list[str]) -> None:
    told = login.refused(login.config("first"), *arguments)
    assert all(text in told for text in said), told


def test_without_a_configuration_there_is_nothing_to_submit(login: Login) -> None:
    assert "CONFIG = (missing)" in login.refused("run.steps=3")


def test_all_mistakes_are_reported_together(login: Login) -> None:
    profile = login.home / "cluster.yaml"
    profile.write_text("partion: x\nruntime: docker\n")
    files = [login.config("one"), login.config("two", stage="sft")]
    told = login.refused(*files, "--profile", str(profile), "--job-name=\n", "--set=qos=''", "run.steps=0")
    headings = [line for line in told.splitlines() if not line.startswith(" ")]
    assert headings == [f"{profile} and command line: 3 problems", "command line: 1 problem", *headings[2:]]
    assert [field for field in told.splitlines() if field.startswith("  ") and " = " in field][:4] == [
        "  qos = ",
        "  runtime = docker",
        "  partion = x",
        "  --job-name = '\\n'",
    ]
    assert "did you mean partition?" in told
    assert "choose one of them; it is: Where megarl is installed" in told
    assert [heading.partition(":")[0] for heading in headings[2:] if "problem" in heading] == files
    assert told.count("run.steps = 0") == 2


def test_two_runs_of_a_chain_need_two_directories(login: Login) -> None:
    files = [login.config("one", stage="sft"), login.config("two")]
    told = login.refused(*files, f"run.dir={login.home}/same")
    assert f"a directory of its own; {files[0]} has this one too" in told


@pytest.mark.parametrize(("stage", "steps", "said"), [("ppo", 3, "has taken its 3 steps"), ("eval", 0, "evaluation")])
def test_finished_runs_are_not_resubmitted(login: Login, stage: str, steps: int, said: str) -> None:
    file = login.config("done", stage=stage)
    finish(login.home / "done", stage=stage, steps=steps)
    assert said in login.refused(file)


def test_a_finished_run_with_more_steps_is_submitted(login: Login) -> None:
    file = login.config("done")
    finish(login.home / "done")
    assert login.launch(file, "run.steps=4").exit_code == 0


def test_without_slurm_the_dry_run_is_suggested(login: Login) -> None:
    (login.tools / "sbatch").unlink()
    told = login.refused(login.config("first"), "--nodes=3")
    assert "sbatch = not found" in told
    assert "with --dry-run" in told
    assert "cluster.nodes = 3" in told, "all at once"


def test_an_unusable_profile_file_is_reported(login: Login) -> None:
    (login.home / ".config/megarl").mkdir(parents=True)
    own = login.home / ".config/megarl/cluster.yaml"
    for text, said in (("- a\n", "keys and values"), ("a: [", "must be YAML"), ("time: 12:00:00\n", "in quotes")):
        own.write_text(text)
        assert said in login.refused(login.config("first"))
    assert Path(own).exists()
