"""`megarl launch slurm`: its files, submissions and output."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest
import yaml

from examples.sort_letters.checkpoint import write_checkpoint
from megarl.config import load
from megarl.dashboard.status.reading import read_status
from megarl.stages.ppo.config import PPOConfig
from tests.config.debug import DEBUG
from tests.launch.slurm_command import Login

pytestmark = pytest.mark.process


def directives(script: Path) -> list[str]:
    """The options of sbatch that a script has."""
    return [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]


def test_a_run_is_written_and_submitted(login: Login) -> None:
    run_dir = login.home / "it's mine"
    result = login.launch(str(DEBUG), f"run.dir={run_dir}", "run.steps=7", "--time", "01:00:00", "--nodes=1")
    assert (result.exit_code, result.stderr) == (0, "")
    script = run_dir / "slurm" / "job.sbatch"
    assert login.submitted == [["--parsable", str(script)]]
    kept = load(login.kept(run_dir.name))
    assert (kept.run.dir, kept.cluster.nodes, kept.cluster.address) == (str(run_dir), 1, "auto")
    assert isinstance(kept, PPOConfig)
    assert kept.run.steps == 7
    assert 'job-name="it\'s mine"' in script.read_text()
    assert [line.split(maxsplit=1) for line in result.stdout.splitlines()] == [
        ["job", f"101: ppo in {run_dir}, 1 node"],
        ["script", str(script)],
        ["output", str(run_dir / "slurm" / "101.out")],
        ["logs", str(run_dir / "slurm" / "101-0")],
        ["follow", f"""squeue --job 101; tail -F '{login.home}/it'"'"'s mine/slurm/101.out'; """
                   f"""megarl status '{login.home}/it'"'"'s mine'"""],
        ["cancel", "scancel 101"],
    ]  # fmt: skip


def test_the_script_is_private(login: Login) -> None:
    script = login.home / "first" / "slurm" / "job.sbatch"
    for _ in range(2):
        assert login.launch(login.config("first"), "--dry-run").exit_code == 0
        assert stat.S_IMODE(script.stat().st_mode) == 0o700
        script.chmod(0o644)


def test_later_edits_do_not_change_a_queued_run(login: Login) -> None:
    file = login.config("first")
    assert login.launch(file).exit_code == 0
    kept = login.kept("first")
    before = kept.read_text()
    Path(file).write_text("stage: nothing")
    assert kept.read_text() == before
    assert "defaults" not in yaml.safe_load(before)


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_later_submissions_do_not_change_a_queued_run(login: Login, options: Sequence[str]) -> None:
    file = login.config("first")
    assert login.launch(file, "run.steps=5").exit_code == 0
    first = login.kept("first")
    before = first.read_text()
    assert login.launch(file, "run.steps=6", *options).exit_code == 0
    second = login.kept("first")
    assert first.read_text() == before
    assert [yaml.safe_load(kept.read_text())["run"]["steps"] for kept in (first, second)] == [5, 6]
    assert login.launch(file, "run.steps=5", *options).exit_code == 0
    assert login.kept("first") == first
    assert first.name == f"config-{hashlib.sha256(before.encode()).hexdigest()[:8]}.yaml"


def test_a_dry_run_shows_the_script_and_submits_nothing(login: Login) -> None:
    (login.tools / "sbatch").unlink()
    (login.home / ".config/megarl").mkdir(parents=True)
    (login.home / ".config/megarl/cluster.yaml").write_text("partition: batch\ntime: '2-00:00:00'\n")
    result = login.launch(login.config("first"), "--dry-run", "--partition", "debug")
    script = login.home / "first" / "slurm" / "job.sbatch"
    assert result.exit_code == 0
    assert result.stdout == script.read_text() + "\n"
    assert {"--partition=debug", "--time=2-00:00:00"} <= set(directives(script))
    assert f"written to {script}; to submit: sbatch --parsable {script}" in result.stderr


def test_a_dry_run_needs_no_weights(login: Login) -> None:
    model = login.home / "model"
    write_checkpoint(model, seed=0)
    (model / "model.safetensors").unlink()
    file = login.config("first", f"model: {{path: {model}, random: null, vocab_size: null}}\n", stage="sft")
    assert f"model.path = {model}\n" in login.refused(file)
    result = login.launch(file, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count(f"model.path: {model} has a config.json and no weights yet; ") == 1


def test_a_named_profile_replaces_the_users_default(login: Login) -> None:
    (login.home / ".config/megarl").mkdir(parents=True)
    (login.home / ".config/megarl/cluster.yaml").write_text("partition: batch\naccount: lab\n")
    other = login.home / "other.yaml"
    other.write_text("partition: gpu\nsbatch: [--mail-type=FAIL]\nenv: {A: 1, B: 2}\n")
    run = [login.config("first"), "--profile", str(other), "--set=sbatch=[--comment=x]", "--set=env.B=a=b"]
    run.append("--set=exclusive=false")
    assert login.launch(*run).exit_code == 0
    script = login.home / "first" / "slurm" / "job.sbatch"
    found = directives(script)
    assert [option for option in found if option.startswith(("--partition", "--account", "--mail", "--comment"))] == [
        "--partition=gpu",
        "--comment=x",
    ]
    assert not {"--exclusive", "--mem=0"} & set(found)
    assert "export A=1\nexport B=a=b\n" in script.read_text()


_CONTAINER = ("--python=/x/python", "--set=runtime.name=pyxis", "--set=runtime.image=/i.sqsh")


@pytest.mark.parametrize("options", list(permutations(_CONTAINER)))
def test_fields_of_a_section_are_set_in_any_order(login: Login, options: tuple[str, ...]) -> None:
    tunnel = [f"--set=nemo_run.tunnel.{field}" for field in ("host=h", "user=u", "job_dir=/j", "name=ssh")]
    tunnel.append("--set=nemo_run.tunnel.directory=/d")
    result = login.launch(login.config("first"), "cluster.device=cuda", "--dry-run", *options, *tunnel)
    assert result.exit_code == 0, result.stderr
    assert "--container-image=/i.sqsh " in result.stdout
    assert "/x/python -m megarl.launch.node" in result.stdout


def test_each_run_of_a_chain_depends_on_the_previous_one(login: Login) -> None:
    files = [login.config("warm", stage="sft"), login.config("rm", stage="reward_model"), login.config("last")]
    result = login.launch(*files, "--dependency=afterany:7", "--job-name=chain")
    assert (result.exit_code, result.stderr) == (0, "")
    scripts = [str(login.home / name / "slurm" / "job.sbatch") for name in ("warm", "rm", "last")]
    assert login.submitted == [
        ["--parsable", "--dependency=afterany:7", scripts[0]],
        ["--parsable", "--dependency=afterok:101", scripts[1]],
        ["--parsable", "--dependency=afterok:102", scripts[2]],
    ]
    assert all("--kill-on-invalid-dep=yes" in directives(Path(script)) for script in scripts)
    assert "job 103: ppo in" in result.stdout
    assert "1 node, after 102" in result.stdout


def test_the_dry_run_of_a_chain_shows_placeholders_for_job_ids(login: Login) -> None:
    result = login.launch(login.config("warm", stage="sft"), login.config("last"), "--dry-run")
    script = login.home / "last" / "slurm" / "job.sbatch"
    waiting = f"sbatch --parsable --dependency=afterok:JOB-1 {script} (JOB-1 is the number of the previous job)"
    assert waiting in result.stderr


def test_a_file_may_have_an_equals_sign_in_its_path(login: Login) -> None:
    file = Path(login.config("first"))
    other = login.home / "lr=1" / "first.yaml"
    other.parent.mkdir()
    file.rename(other)
    text = f"tracking.wandb_project={'long' * 100}"
    assert login.launch(str(other), text).exit_code == 0
    assert text.partition("=")[2] in login.kept("first").read_text()


def test_an_evaluation_is_submitted_as_an_evaluation(login: Login) -> None:
    result = login.launch(login.config("judged", stage="eval"))
    assert result.exit_code == 0, result.stderr
    assert '600 eval "$config"' in (login.home / "judged" / "slurm" / "job.sbatch").read_text()


def test_a_refusal_by_sbatch_is_reported_with_the_script(login: Login) -> None:
    login.give_sbatch(refused=2)
    files = [login.config("first", stage="sft"), login.config("second")]
    result = login.launch(*files, "--time=90", "--partition=nowhere")
    assert result.exit_code == 1
    script = login.home / "second" / "slurm" / "job.sbatch"
    assert result.stderr.splitlines() == [
        "sbatch: error: invalid partition specified: nowhere",
        f"refused by sbatch: {script}",
        "submitted before it: 101; to cancel: scancel 101",
    ]


@pytest.mark.parametrize(("answer", "job"), [("", None), ("no job", None), ("welcome to batch\n7;gpus", "7")])
def test_the_job_id_is_read_from_the_answer_of_sbatch(login: Login, answer: str, job: str | None) -> None:
    (login.tools / "sbatch").write_text(f"#!/bin/sh\necho '{answer}'\n")
    result = login.launch(login.config("first"))
    if job is None:
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("sbatch has answered without the number of a job: ")
    else:
        assert result.stdout.startswith(f"job {job}: ")


def test_a_queued_job_has_a_status(login: Login) -> None:
    assert login.launch(login.config("first")).exit_code == 0
    found = read_status(login.home / "first")
    assert (found.state.name, found.job_logs) == ("waiting", str(login.home / "first" / "slurm"))


def test_a_job_submitted_from_within_a_job_is_independent_of_it(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "cores")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    monkeypatch.setenv("SBATCH_ACCOUNT", "lab")
    assert login.launch(login.config("first")).exit_code == 0
    ((_, environment),) = login.calls
    assert "SLURM_CPU_BIND" not in environment
    assert (environment["SLURM_CONF"], environment["SBATCH_ACCOUNT"]) == ("/etc/other.conf", "lab")


def test_script_directives_override_sbatch_variables(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ("PARTITION", "TIMELIMIT", "EXCLUSIVE", "MEM_PER_NODE", "SIGNAL", "NO_REQUEUE", "JOB_NAME", "COMMENT")
    for name in (*said, "ACCOUNT", "QOS"):
        monkeypatch.setenv(f"SBATCH_{name}", "other")
    given = ["--partition=a", "--time=90", "--set=sbatch=[--comment=two words]"]
    assert login.launch(login.config("first"), *given).exit_code == 0
    ((_, environment),) = login.calls
    assert {name for name in environment if name.startswith("SBATCH_")} == {"SBATCH_ACCOUNT", "SBATCH_QOS"}
