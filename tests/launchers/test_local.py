"""Experiments on this machine, by NeMo-Run's LocalExecutor: order, endings, and arguments of the runs."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import yaml

from megarl.config import load
from tests.launchers.scripts import ROOT, UMASK, User, user
from tests.leftovers import Trace, comes_true

pytestmark = pytest.mark.process

STAGES = ("configs/debug/sft.yaml", "configs/debug/reward_model.yaml")


@pytest.fixture
def here(tmp_path: Path) -> User:
    """A user of NeMo-Run."""
    return user(tmp_path)


def stages(here: User) -> list[str]:
    return [call["stage"] for call in here.calls if "arguments" in call]


def test_a_pipeline_runs_its_stages_in_order(here: User) -> None:
    profile = here.directory / "profile.yaml"
    profile.write_text('env: {GREETING: it\'s "two" words and $HOME}\nsetup: [\'export ADDED="$GREETING!"\']\n')
    python = ("--python", str(here.stand_in), "--profile", str(profile))
    done = here.call("pipeline", *STAGES, "run.seed=5", *python)
    assert done.returncode == 0, done.stderr
    assert stages(here) == ["sft", "reward_model"]
    for call, file in zip(here.calls, STAGES, strict=True):
        assert call["arguments"][:-1] == ["-m", "megarl", "train"]
        assert load(ROOT / file, ["run.seed=5"]).model_dump(mode="json", by_alias=True) == yaml.safe_load(
            call["config"]
        )
        assert call["at"] == str(ROOT)
        assert call["environment"]["GREETING"] == 'it\'s "two" words and $HOME'
        assert call["environment"]["ADDED"] == 'it\'s "two" words and $HOME!'
        assert call["umask"] == UMASK
    assert "sft/0 the stand-in runs sft" in done.stdout
    assert here.readable == []


def test_stages_after_a_failed_one_do_not_start(here: User) -> None:
    here.let("sft", fail=True)
    files = [here.directory / f"{name}.yaml" for name in ("sft", "reward_model")]
    for file, base in zip(files, STAGES, strict=True):
        file.write_text(f"defaults: [{ROOT / base}]\nrun: {{dir: {file.with_suffix('')}}}\n")
    (here.directory / "sft").mkdir()
    done = here.call("pipeline", *map(str, files), "--python", str(here.stand_in))
    assert done.returncode == 1
    assert stages(here) == ["sft"]
    assert f"sft: FAILED; see megarl status {here.directory / 'sft'}" in done.stderr
    told = re.search(r"^reward_model: FAILED; its run has not started; see (\S+)$", done.stderr, flags=re.MULTILINE)
    assert told
    assert "reward_model is not started: sft has not succeeded" in Path(told[1]).read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_run_cleanly(here: User, number: signal.Signals) -> None:
    trace = Trace()
    here = user(here.directory, here.python, **trace.environment())
    here.let("sft", stay=True)
    process = here.start("pipeline", *STAGES, "--python", str(here.stand_in))
    assert comes_true(lambda: bool(here.calls), 120)
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, output + errors
    assert [call.get("ended") for call in here.calls] == [None, signal.SIGTERM]
    assert trace.processes() == []
