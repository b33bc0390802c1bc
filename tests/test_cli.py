"""The command line: output and exit codes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner, Result

import megarl.loop
from megarl import doctor
from megarl.cli import app
from megarl.cluster.calls import WorkerError
from megarl.config import ConfigError, Problem, RunConfig
from tests.config.debug import DEBUG, REPOSITORY, debug


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from megarl.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["train", str(DEBUG), "algo.policy_loss.clip=-1", "rollout.tp=3"], ["clip = -1", "rollout.tp = 3"]),
        (["plan", "nowhere.yaml"], ["nowhere.yaml"]),
    ],
)
def test_a_wrong_configuration_gives_one_message_and_exit_code_2(arguments: list[str], texts: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(text in done.stderr for text in texts)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "field"),
    [(["--num_generations", "4"], "num_generations=VALUE"), (["--learning_rate=1e-6"], "learning_rate=1e-6")],
)
@pytest.mark.parametrize("command", ["plan", "train", "eval"])
def test_an_unknown_option_is_answered_with_how_a_field_is_set(command: str, options: list[str], field: str) -> None:
    done = CliRunner().invoke(app, [command, str(DEBUG), *options], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"Fields of the configuration come after its file, as {field}" in done.output


def test_the_version_is_that_of_the_package() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert CliRunner().invoke(app, ["--version"]).stdout == f"megarl {version}\n"


def commands(command: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """The paths of a command and of all below it."""
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *path, name)


@pytest.mark.parametrize("path", [*commands(typer.main.get_command(app))], ids=" ".join)
def test_help_is_complete_on_a_narrow_terminal(path: tuple[str, ...]) -> None:
    assert "…" not in helped(app, *path)


@pytest.mark.parametrize("script", ["ppo", "pipeline"])
def test_help_of_launch_is_complete_on_a_narrow_terminal(script: str) -> None:
    pytest.importorskip("nemo_run")
    assert "…" not in helped(import_module(f"launchers.{script}").app)


def helped(command: typer.Typer, *path: str) -> str:
    """What --help shows on 80 columns."""
    return CliRunner().invoke(command, [*path, "--help"], env={"COLUMNS": "80"}, catch_exceptions=False).stdout


@pytest.mark.process
def test_help_of_every_command_needs_no_heavy_imports() -> None:
    code = f"""
import sys
from megarl.cli import app
for command in (["--help"], ["plan", {str(DEBUG)!r}], ["train", {str(DEBUG)!r}, "algo.policy_loss.clip=-1"]):
    try:
        app(command)
    except SystemExit:
        pass
print("heavy:", sorted({{"torch", "ray", "vllm", "transformers", "megatron"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def train_with(monkeypatch: pytest.MonkeyPatch, loop: Mock) -> Result:
    """`megarl train` with a fake loop."""
    monkeypatch.setattr(megarl.loop, "train", types.SimpleNamespace(train_with_restarts=loop), raising=False)
    return CliRunner().invoke(app, ["train", str(DEBUG), "run.steps=7"], catch_exceptions=False)


def test_train_runs_the_loop_with_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Mock()
    assert train_with(monkeypatch, loop).exit_code == 0
    loop.assert_called_once_with(debug("run.steps=7"))


def test_profile_starts_a_separate_run_with_the_configured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[RunConfig] = []
    monkeypatch.setattr(megarl.loop, "train", types.SimpleNamespace(profile=received.append), raising=False)
    given = [
        ["run.dir=runs/a"],
        ["run.dir=runs/a/", "profile.steps=[1,3]", "rollout.record=runs/a/rollouts", "tracking.wandb_project=mine"],
        ["run.dir=runs/a", "run.steps=1", "rollout={tp: 2, devices: 0-1}"],
    ]
    for overrides in given:
        assert CliRunner().invoke(app, ["profile", str(DEBUG), *overrides], catch_exceptions=False).exit_code == 0
    assert received == [
        debug("run.dir=runs/a-profile", "profile={}"),
        debug("run.dir=runs/a-profile", "profile={steps: [1, 3]}"),
        debug("run.dir=runs/a-profile", "profile={}", "run.steps=1", "rollout={tp: 2, devices: 0-1}"),
    ]
    evaluation = CliRunner().invoke(app, ["profile", str(DEBUG.with_stem("eval"))])
    assert (evaluation.exit_code, "a stage that trains" in evaluation.stderr) == (2, True)


def test_train_ends_with_the_message_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(field="run.dir", value="here", rule="holds no run yet", fix="choose another")
    refused = train_with(monkeypatch, Mock(side_effect=ConfigError([problem])))
    assert (refused.exit_code, refused.stderr) == (2, f"{DEBUG}: 1 problem\n{problem}\n")
    failed = train_with(monkeypatch, Mock(side_effect=WorkerError("train rank 3 died")))
    assert (failed.exit_code, failed.stderr) == (1, "train rank 3 died\n")


def test_train_does_not_hide_its_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        train_with(monkeypatch, Mock(side_effect=ZeroDivisionError()))


def test_plan_prints_placement_and_batches() -> None:
    result = CliRunner().invoke(app, ["plan", str(DEBUG), "algo.mini_batches=4"], env={"COLUMNS": "120"})
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["actor", "train", "0-3", "2", "2", "1", "1", "1", "no", "128"] in rows
    assert ["reward", "train", "0-3", "1", "1", "1", "4", "1", "no", "128"] in rows
    assert "2 epochs x 4 mini-batches of 4 samples = 8 optimizer steps" in result.stdout
    assert "kl: {in: reward, estimator: {name: k1}, coef: 0.05}" in result.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("sft", "16 sequences of up to 64 tokens"),
        ("reward_model", "configs/debug/data/pairs.jsonl: 32 rows; 1 epoch in 4 steps of 8\n"),
        ("raft", "6 prompts x 4 = 24 samples"),
        ("eval", "prompts.jsonl: 32 rows; 4 sampled for each"),
    ],
)
def test_plan_reads_every_stage(stage: str, text: str, tmp_path: Path) -> None:
    command = ["plan", str(DEBUG.with_stem(stage)), f"run.dir={tmp_path / 'run'}"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.stderr
    assert text in result.stdout


def test_plan_prints_what_is_set() -> None:
    overrides = [
        "algo.filter=nonzero_std",
        "algo.policy_loss={name: ppo, clip_high: 0.28}",
        "algo.correction.m2po={}",
        "actor.ema={}",
        "rollout.sync_every=2",
        "algo.scores.missing_end=mask",
        "ptx={data: configs/debug/data/demonstrations.jsonl, max_tokens: 64, sequences_per_mini_batch: 2, coef: 27.8}",
    ]
    result = CliRunner().invoke(app, ["plan", str(DEBUG), *overrides], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.stderr
    shown = {line[:13].strip(): line[14:] for line in result.stdout.splitlines()}
    for row, texts in {
        "algo": ["clip_high: 0.28", "m2po: {}", "filter: {name: nonzero_std}", "missing_end: {name: mask}"],
        "texts": ["2 rows of configs/debug/data/demonstrations.jsonl (32 rows)"],
        "average": ["actor", "0.992"],
        "weights": ["every 2 steps"],
    }.items():
        assert all(text in shown[row] for text in texts), shown[row]


def put(directory: Path, module: str, text: str, version: str) -> None:
    """A module and the metadata of its distribution."""
    (directory / f"{module}.py").write_text(text)
    info = directory / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that comes first in this process's module path and in that of its children."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def package(name: str) -> doctor.Package:
    return doctor.Package(name, (name,), "install it")


@pytest.mark.process
def test_doctor_distinguishes_working_missing_and_broken_packages(site: Path) -> None:
    put(site, "soundpkg", "", "1.5")
    put(site, "brokenpkg", "raise ImportError('no such operator')", "2.0")
    assert doctor.examine_package(package("soundpkg")).status == "ok"
    broken = doctor.examine_package(package("brokenpkg"))
    assert (broken.status, broken.found, broken.fix) == ("broken", "2.0: ImportError: no such operator", "install it")
    assert doctor.examine_package(package("absentpkg")).found == "not installed"


@pytest.mark.process
def test_doctor_refuses_unsupported_versions(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(site, "oldpkg", "", "0.27.1")
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ['oldpkg<0.33,>=0.28; extra == "gpu"'])
    finding = doctor.examine_package(package("oldpkg"))
    assert finding.status == "broken"
    assert finding.fix == "install a version <0.33,>=0.28"


@pytest.mark.process
def test_doctor_flags_a_package_built_for_another_torch(site: Path) -> None:
    put(site, "torchvision", "raise RuntimeError('operator torchvision::nms does not exist')", "0.9")
    finding = doctor.examine_companion("torchvision")
    assert finding is not None
    assert finding.status == "broken"
    assert finding.fix.startswith("pip uninstall torchvision")
    put(site, "torchaudio", "", "0.9")
    assert doctor.examine_companion("torchaudio") is None


@pytest.mark.process
def test_doctor_does_not_wait_for_ever(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(site, "slowpkg", "import time; time.sleep(60)", "1.0")
    monkeypatch.setattr(doctor, "_IMPORT_SECONDS", 0.5)
    assert "no answer in 0.5 s" in doctor.examine_package(package("slowpkg")).found


FAKE_TORCH = """
class version: cuda = "13.0"
class cuda:
    device_count = staticmethod(lambda: {count})
    get_device_name = staticmethod(lambda index: {name})
def zeros(*shape, device): {allocate}
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("changes", "driver", "status", "found"),
    [
        ({}, "580.159.04", "ok", "13.0: H200"),
        ({"name": "1 // 0"}, "535.1", "broken", "driver 535.1: ZeroDivisionError"),
        ({"allocate": "1 // 0"}, "580.65", "broken", "driver 580.65: ZeroDivisionError"),
        ({"count": 0}, "535.1", "broken", "driver 535.1; torch is built for CUDA 13.0"),
        ({"count": 0}, "580.65", "missing", "no device; torch is built for CUDA 13.0"),
        ({"count": 0}, None, "missing", "no device; torch is built for CUDA 13.0"),
    ],
)
def test_doctor_says_why_cuda_fails(
    changes: dict[str, Any], driver: str | None, status: str, found: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML counts devices that CUDA cannot use: only a name or an allocation shows it."""
    parts = {"count": 1, "name": "'H200'", "allocate": "pass", **changes}
    put(site, "torch", FAKE_TORCH.format(**parts), "2.13")
    monkeypatch.setattr(doctor, "_DRIVER", site / "version")
    if driver is not None:
        line = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Thu Nov 26 12:00:00 UTC 2026"
        (site / "version").write_text(f"{line}\nGCC version:  gcc version 13.3.0\n")
    cuda, *others = doctor.cuda_devices(torch_works=True)
    assert cuda.status == status
    assert cuda.found.startswith(found)
    assert [one.name for one in others] == (["C compiler"] if status == "ok" else [])
    assert list(doctor.cuda_devices(torch_works=False)) == []


def test_doctor_names_a_missing_compiler_and_missing_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, header = tmp_path / "gcc", tmp_path / "Python.h"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda *_: str(tmp_path))
    assert doctor.compiler().found == "no gcc or clang; Triton needs one at run time"
    compiler.touch(mode=0o755)
    assert doctor.compiler().found == f"{compiler}, but no {header}; Triton needs it at run time"
    header.touch()
    assert doctor.compiler() == doctor.Finding("C compiler", "ok", str(compiler))


def test_doctor_names_what_computes_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(
        [
            subprocess.CompletedProcess("", 0, 'noise\n[["rope", "eager", "why"]]\n', ""),
            subprocess.CompletedProcess("", 1, "", "Traceback\nOSError: libcuda"),
        ]
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: next(answers))
    assert list(doctor.kernels()) == [doctor.Finding(name="rope", status="ok", found="eager: why")]
    assert [(one.status, one.found) for one in doctor.kernels()] == [("broken", "OSError: libcuda")]


def test_doctor_fails_if_a_package_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = doctor.Finding(name="python", status="ok", found="3.11")
    absent = doctor.Finding(name="apex", status="missing", found="not installed", fix="build [it]")
    broken = doctor.Finding(name="ray", status="broken", found="not installed", fix="pip install ray")
    monkeypatch.setattr(doctor, "examine", lambda: [sound, absent])
    calm = CliRunner().invoke(app, ["doctor"])
    assert calm.exit_code == 0
    assert "build [it]" in calm.stdout
    monkeypatch.setattr(doctor, "examine", lambda: [sound, absent, broken])
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1
