"""Batch scripts: their text, and that arguments arrive unchanged, whatever their characters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from setuptools import Distribution
from setuptools.command.build_py import build_py

from megarl.launch.node.__main__ import app as agent
from megarl.launch.profile import Bare
from megarl.launch.render import render
from tests.debian import program
from tests.launch.scripts import GOLDEN, JOBS, job
from tests.needs import lacking

pytestmark = pytest.mark.process

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted(GOLDEN.glob("*.sbatch")), REPOSITORY / "slurm" / "train.sbatch"]

NASTY = 'it\'s $HOME `id` "two"  words; #& \\ * %j é'
RECORDER = f"""#!{sys.executable}
import json, os, sys
name = os.path.basename(sys.argv[0])
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([name, sys.argv[1:], dict(os.environ)]) + "\\n")
if name == "srun":
    options = next(place for place, text in enumerate(sys.argv[1:], 1) if not text.startswith("--"))
    os.environ["SLURM_NODEID"] = "0"
    os.execvp(sys.argv[options], sys.argv[options:])
sys.exit(int(os.environ.get("RC", "0")))
"""


SQUEUE = """#!/bin/bash
[[ "$*" == "--noheader --states=RUNNING --job=4711 --format=%e" ]] && echo "${END:-NA}"
"""


@pytest.mark.parametrize("name", JOBS)
def test_scripts_equal_the_golden_files(name: str) -> None:
    golden = (GOLDEN / f"{name}.sbatch").read_text(encoding="utf-8")
    assert render(JOBS[name]) == golden, "python -m tests.launch.scripts writes the files anew; read them then"


def test_every_golden_file_has_a_job() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == set(JOBS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_pass_shell_parsing_and_shellcheck(script: Path) -> None:
    shellcheck = program("shellcheck")
    if shellcheck is None:
        lacking("no shellcheck on this machine: make slurm installs it")
    for command in (["bash", "-n"], [shellcheck]):
        done = subprocess.run([*command, str(script)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_plain_script_uses_the_same_srun_options() -> None:
    """Both start the nodes in the same way, except for the source of the configuration."""
    (plain,), (rendered,) = (
        re.findall(r"^srun (.*) \\$", text, re.MULTILINE)
        for text in (SCRIPTS[-1].read_text(encoding="utf-8"), render(JOBS["bare"]))
    )
    assert plain == rendered
    assert tuple(plain.split()) == JOBS["bare"].srun
    assert "--wait=720" in plain


def executed(script: str, directory: Path, *arguments: str, said: str = "", **env: str) -> tuple[int, list[list[Any]]]:
    """Runs a script, which writes `said` to stderr, with programs that record how they are called."""
    tools, record = directory / "tools", directory / "record"
    tools.mkdir(exist_ok=True)
    for name in ("srun", "apptainer", "python", "squeue"):
        (tools / name).write_text(SQUEUE if name == "squeue" else RECORDER, encoding="utf-8")
        (tools / name).chmod(0o755)
    record.unlink(missing_ok=True)
    (directory / "job.sbatch").write_text(script, encoding="utf-8")
    path = f"{tools}:/usr/bin:/bin"
    of_job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "3"}
    environment = {"PATH": path, "RECORD": str(record), "HOME": "/home/me", "TZ": "UTC", **of_job, **env}
    command = ["bash", str(directory / "job.sbatch"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=directory)
    assert done.stderr == said
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    return done.returncode, [json.loads(line) for line in lines]


NAMES = st.text(
    st.characters(blacklist_categories=["C", "Zl", "Zp"], blacklist_characters="/\\"), min_size=1, max_size=20
)


@settings(max_examples=15)
@given(name=NAMES, value=st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=20))
def test_paths_and_variables_are_quoted(tmp_path_factory: pytest.TempPathFactory, name: str, value: str) -> None:
    directory = tmp_path_factory.mktemp("script")
    run_dir = Path("/home/me") / f"x{name}"
    interface = re.sub(r"[\s,]", "-", f"i{name}")[:15]
    profile = {"runtime": {"python": "python"}, "env": {"GIVEN": value}, "interface": interface}
    rc, recorded = executed(render(job(profile, run_dir=run_dir)), directory)
    assert rc == 0
    (_, _, variables), (program_name, arguments, _) = recorded
    assert variables["GIVEN"] == value
    assert program_name == "python"
    assert arguments == [
        "-m", "megarl.launch.node", "--interface", interface, "--start-limit", "600", "train",
        f"{run_dir}/slurm/config-0123abcd.yaml",
    ]  # fmt: skip


def test_every_job_has_its_own_secret(tmp_path: Path) -> None:
    script = render(job({"runtime": {"python": "python"}}))
    secrets = {executed(script, tmp_path)[1][-1][2]["RAY_AUTH_TOKEN"] for _ in range(2)}
    assert len(secrets) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in secrets)


@pytest.mark.parametrize("runtime", ["bare", {"name": "apptainer", "image": "/i"}])
@pytest.mark.parametrize(
    ("line", "said", "code"),
    [
        ("(exit 3)", "( exit 3 )", 3),
        ("source ./site", '[[ -n "$NOT_SET" ]]', 1),
        ("module() { (exit 4); true; }; module load a", "( exit 4 )", 4),
    ],
)
def test_a_failing_line_of_setup_ends_the_job(tmp_path: Path, runtime: Any, line: str, said: str, code: int) -> None:
    (tmp_path / "site").write_text('[[ -n "$NOT_SET" ]]\n')
    script = render(job({"setup": [line], "runtime": runtime}))
    assert executed(script, tmp_path, said=f"setup: {said}: exit code {code}\n") == (code, [])


@pytest.mark.parametrize(("end", "told"), [("2033-05-18T03:33:20", "2000000000"), ("NA", None)])
def test_the_run_knows_when_its_job_ends(tmp_path: Path, end: str, told: str | None) -> None:
    _, recorded = executed(render(job({"runtime": {"python": "python"}})), tmp_path, END=end)
    assert recorded[-1][2].get("SLURM_JOB_END_TIME") == told


def test_the_script_has_the_exit_code_of_the_run(tmp_path: Path) -> None:
    script = render(job({"setup": ["true"], "runtime": {"python": "python"}}))
    assert executed(script, tmp_path, RC="7")[0] == 7


def test_setup_may_read_unset_variables(tmp_path: Path) -> None:
    profile = {"runtime": {"python": "python"}, "setup": ['export SEEN="<$NOT_SET>"']}
    rc, recorded = executed(render(job(profile)), tmp_path)
    assert (rc, recorded[0][2]["SEEN"]) == (0, "<>")


def contained(tmp_path: Path, runtime: dict[str, Any], **changes: Any) -> tuple[list[str], list[Any]]:
    """The arguments of srun and of the container's program."""
    profile = {"runtime": {"mounts": ["/data", "/models:/m"], **runtime}, "env": {"GIVEN": NASTY, "OTHER": "1"}}
    rc, recorded = executed(render(job(profile, **changes)), tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert rc == 0
    return recorded[0][1], recorded[-1]


def test_pyxis_gets_directories_and_variables(tmp_path: Path) -> None:
    changes = {"workdir": Path("/w 'd"), "run_dir": Path("/w 'd/runs")}
    srun, last = contained(tmp_path, {"name": "pyxis", "image": "a b#c:1"}, **changes)
    first = srun.index("--container-image=a b#c:1")
    assert srun[first : first + 5] == [
        "--container-image=a b#c:1",
        "--container-mounts=/w 'd:/w 'd,/data:/data,/models:/m",
        "--container-workdir=/w 'd",
        "--container-env=GIVEN,OTHER",
        "python",
    ]
    assert last[2]["GIVEN"] == NASTY


def test_apptainer_sees_gpus_directories_and_variables(tmp_path: Path) -> None:
    runtime = {"name": "apptainer", "image": "/i d.sif", "options": ["--writable-tmpfs"]}
    _, (name, arguments, variables) = contained(tmp_path, runtime, run_dir=Path("/home/me/work/it's"))
    assert name == "apptainer"
    assert arguments[: arguments.index("python")] == [
        "exec", "--nv", "--pwd", "/home/me/work", "--bind", "/home/me/work:/home/me/work", "--bind", "/data:/data",
        "--bind", "/models:/m", "--writable-tmpfs", "/i d.sif",
    ]  # fmt: skip
    assert variables["APPTAINERENV_GIVEN"] == NASTY
    assert "RAY_AUTH_TOKEN" in variables


def test_the_plain_script_requires_a_configuration(tmp_path: Path) -> None:
    usage = "usage: sbatch train.sbatch CONFIG [KEY.PATH=VALUE]...\n"
    assert executed(SCRIPTS[-1].read_text(encoding="utf-8"), tmp_path, said=usage) == (2, [])


def test_the_plain_script_forwards_its_arguments(tmp_path: Path) -> None:
    script = SCRIPTS[-1].read_text(encoding="utf-8")
    rc, recorded = executed(script, tmp_path, "a b.yaml", f"run.dir={NASTY}")
    assert rc == 0
    assert recorded[-1][1] == [
        "-m", "megarl.launch.node", "train", "a b.yaml", f"run.dir={NASTY}", "cluster.nodes=3",
    ]  # fmt: skip


@pytest.mark.parametrize("index", range(4))
def test_the_documented_job_array_runs_every_combination(tmp_path: Path, index: int) -> None:
    page = (REPOSITORY / "docs" / "slurm.md").read_text(encoding="utf-8").partition("## Many runs")[2]
    (lines,) = re.findall(r"^```bash\n(.*?)^```", page.partition("\n## ")[0], flags=re.MULTILINE | re.DOTALL)
    before, srun, _ = SCRIPTS[-1].read_text(encoding="utf-8").partition("srun --ntasks-per-node=1")
    assert srun
    _, recorded = executed(before + lines, tmp_path, "mine.yaml", SLURM_ARRAY_TASK_ID=str(index))
    rate = ("1e-6", "2e-6")[index // 2]
    assert recorded[-1][1][2:] == [
        "train", "mine.yaml", f"actor.optimizer.lr={rate}", f"run.seed={index % 2}", f"run.dir=runs/sweep/{index}",
        "cluster.nodes=3",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["bare", "module", "cpu"])
def test_the_node_agent_parses_its_arguments(tmp_path: Path, name: str) -> None:
    made = JOBS[name]
    profile = made.profile.model_copy(update={"runtime": Bare(python="python"), "setup": ()})
    _, recorded = executed(render(replace(made, profile=profile)), tmp_path)
    module, *arguments = recorded[-1][1][1:]
    assert module == "megarl.launch.node"
    read = typer.main.get_command(agent).make_context("node", arguments).params
    assert (read["command"], read["config"]) == (made.command, made.config)
    assert (read["interface"], read["start_limit"]) == (profile.interface, profile.start_limit)


@pytest.mark.parametrize("text", [NASTY, "plain-name_1.5", "a#b", "'", '"', "\\", ":a", "-x", "a=b c"])
def test_slurm_parses_directives_as_intended(tmp_path: Path, text: str) -> None:
    """Slurm's own parser prints what it has parsed, before it looks for a controller."""
    sbatch = program("sbatch")
    if sbatch is None:
        lacking("no Slurm on this machine: make slurm installs it")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=2\n")
    present = tmp_path / re.sub(r"[\\/]", "", f"x{text}")
    present.mkdir()
    (tmp_path / "job.sbatch").write_text(render(job({"sbatch": [f"--comment={text}"]}, name=text, workdir=present)))
    done = subprocess.run(
        [sbatch, "-v", str(tmp_path / "job.sbatch")],
        env={"PATH": os.environ["PATH"], "SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        check=False,
    )
    read = dict(re.findall(r"^sbatch: ([a-z-]+) +: (.*)$", done.stderr, re.MULTILINE))
    assert (read["job-name"], read["comment"], read["chdir"]) == (text, text, str(present))


def test_a_wheel_contains_the_templates() -> None:
    """The package data that setuptools finds, following the link in the package."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    command = build_py(Distribution({"packages": ["megarl"], "package_data": settings}))
    command.ensure_finalized()
    command.manifest_files = {}
    found = {Path(file) for file in command.find_data_files("megarl", str(REPOSITORY / "megarl"))}
    templates = REPOSITORY / "megarl" / "launch" / "templates"
    assert {file.name for file in found if file.parent == templates} == {
        file.name for file in (REPOSITORY / "slurm").iterdir()
    }


def test_containers_of_jobs_without_gpus_request_none() -> None:
    assert "--nv" not in render(job({"runtime": {"name": "apptainer", "image": "i"}}, gpus=0))


def test_the_default_interpreter_is_the_submitting_one() -> None:
    assert f"{sys.executable} -m megarl.launch.node" in render(job({"runtime": "bare"}))
