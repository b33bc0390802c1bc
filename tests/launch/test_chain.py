"""Chains: outputs of earlier runs may be missing; any other missing path is reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.config import ConfigError, load
from megarl.stages.ppo.config import PPOConfig
from tests.config.debug import DEBUG, by_field
from tests.launch.slurm_command import Login, finish

pytestmark = pytest.mark.process


def test_models_of_earlier_runs_may_be_missing(login: Login) -> None:
    warm, rm = login.config("warm", stage="sft"), login.config("rm", stage="reward_model")
    models = f"model: {{path: {login.home}/warm/export, random: null}}\nreward: {{path: {login.home}/rm/export}}\n"
    last = login.config("last", models)
    assert login.launch(warm, rm, last).exit_code == 0
    kept = load(login.kept("last"), pending_paths=[login.home / "warm", login.home / "rm"])
    assert isinstance(kept, PPOConfig)
    assert (kept.model.path, kept.model.random) == (f"{login.home}/warm/export", None)
    assert kept.reward.path == f"{login.home}/rm/export"


def test_a_pending_model_is_checked_like_its_base_model(login: Login) -> None:
    model = f"model: {{path: {login.home}/%s/export, random: null}}\n"
    warm, again = login.config("warm", stage="sft"), login.config("again", model % "warm", stage="sft")
    told = login.refused(warm, again, login.config("last", f"{model % 'again'}rollout: {{max_model_len: 129}}\n"))
    assert "at most the 128 positions of the model" in told
    assert "model.path" not in told


def test_a_later_run_sees_the_directories_of_earlier_ones(login: Login) -> None:
    models = f"model: {{path: {login.home}/warm/export, random: null}}\nreward: {{path: {login.home}/rm/export}}\n"
    files = [login.config("warm", stage="sft"), login.config("rm", stage="reward_model"), login.config("last", models)]
    assert login.launch(*files, "--set=runtime={name: pyxis, image: image}").exit_code == 0
    mounts = [f"{path}:{path}" for path in (Path.cwd(), *(login.home / name for name in ("last", "warm", "rm")))]
    assert f"--container-mounts={','.join(mounts)} " in (login.home / "last/slurm/job.sbatch").read_text()


@pytest.mark.parametrize("order", [("last", "warm"), ("last",)])
def test_paths_that_no_earlier_run_writes_are_reported(login: Login, order: tuple[str, ...]) -> None:
    files = {
        "warm": login.config("warm", stage="sft"),
        "last": login.config("last", f"model: {{path: {login.home}/warm/export, random: null}}\n"),
    }
    told = login.refused(*(files[name] for name in order))
    assert f"model.path = {login.home}/warm/export" in told


def test_outputs_of_a_run_with_mistakes_are_not_reported_as_missing(login: Login) -> None:
    model = f"model: {{path: {login.home}/%s/export, random: null}}\n"
    warm = login.config("warm", "data: {train: rows.jsonl}\n", stage="sft")
    again = login.config("again", f"{model % 'warm'}data: {{train: rows.jsonl}}\n", stage="sft")
    told = login.refused(warm, again, login.config("last", f"{model % 'again'}rollout: {{tp: 3}}\n"))
    assert "export" not in told
    assert (told.count("data.train = rows.jsonl"), told.count("rollout.tp = 3")) == (2, 1)


def test_leaving_out_a_finished_run_is_suggested_only_in_a_chain(login: Login) -> None:
    done = login.config("done")
    finish(login.home / "done")
    assert "to continue it, leave it out, or choose" in login.refused(done, login.config("next"))
    assert "to continue it, or choose" in login.refused(done)


def test_relative_and_absolute_directories_are_the_same(login: Login) -> None:
    first = login.config("warm", stage="sft")
    relative = os.path.relpath(login.home / "warm" / "export")
    model = f"model: {{path: {relative}, random: null}}\n"
    assert login.launch(first, login.config("last", model)).exit_code == 0


def test_load_skips_only_checks_of_pending_paths(tmp_path: Path) -> None:
    overrides = [f"model.path={tmp_path}/a/export", "model.random=null", f"reward.path={tmp_path}/ab", "algo.epochs=1"]
    with pytest.raises(ConfigError) as caught:
        load(DEBUG, overrides, pending_paths=[tmp_path / "a"])
    assert set(by_field(caught.value)) == {"reward.path", "algo.epochs"}
