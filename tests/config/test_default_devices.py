"""A configuration without devices runs on one device of this machine, and inherits recipes by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import ConfigError, default_devices, load
from megarl.stages.ppo.config import PPOConfig
from tests.config.debug import DEBUG, OWN_DEVICE, debug

MINIMAL = {
    "defaults": ["grpo"],
    "run": {"dir": "runs/mine", "steps": 2},
    "data": {"random": {"count": 64, "min_tokens": 4, "max_tokens": 8}},
    "rollout": {"max_model_len": 2048},
    "reward": {"functions": [{"name": "soft_overlong"}]},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the config.json of the debug runs' model."""
    raw = yaml.safe_load((DEBUG.parent / "base.yaml").read_text())
    fields = {**raw["model"]["random"]["config"], "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def loaded(model: Path, *overrides: str, **sections: Any) -> PPOConfig:
    file = model / "mine.yaml"
    file.write_text(yaml.safe_dump({**MINIMAL, "model": {"path": str(model)}, **sections}))
    config = load(file, overrides)
    assert isinstance(config, PPOConfig)
    return config


def test_a_coefficient_of_0_turns_the_penalty_of_a_recipe_off(model: Path) -> None:
    config = loaded(model, "algo.kl.coef=0")
    assert set(config.groups["train"].roles) == {"actor"}
    with pytest.raises(ConfigError, match=r"algo\.kl\.in = loss\n.*no effect with algo\.kl\.coef = 0"):
        loaded(model, defaults=["dapo"], algo={"kl": {"in": "loss"}})


def test_the_trainer_and_the_engine_share_the_cpu_where_there_is_no_gpu(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_devices, "_has_gpu", lambda: False)
    config = loaded(model)
    assert (config.cluster.device, config.cluster.nodes, config.cluster.devices_per_node) == ("cpu", 1, 1)
    assert {name: (group.devices, set(group.roles)) for name, group in config.groups.items()} == {
        "train": ("0", {"actor", "reference"})
    }
    assert (config.rollout.devices, config.rollout.sleep, config.role("actor").offload) == ("0", False, False)


def test_the_trainer_and_the_engine_alternate_on_a_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_devices, "_has_gpu", lambda: True)
    config = loaded(model, "algo.kl={in: reward, estimator: k1, coef: 0}")
    assert config.cluster.device == "cuda"
    assert set(config.groups["train"].roles) == {"actor"}
    assert (config.rollout.devices, config.rollout.sleep, config.role("actor").offload) == ("0", True, True)
    assert not loaded(model, "rollout.sleep=false").rollout.sleep


def test_engines_sleep_where_they_share_gpus_with_groups() -> None:
    on_gpus = ["cluster.device=cuda"]
    assert debug(*on_gpus).rollout.sleep
    assert not debug().rollout.sleep  # a CPU frees nothing
    assert not debug(*on_gpus, "rollout.sleep=false").rollout.sleep
    assert not debug(*on_gpus, "rollout.sync_every=2").rollout.sleep
    assert not debug(*on_gpus, *OWN_DEVICE).rollout.sleep


def test_roles_are_derived_from_the_configuration(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_devices, "_has_gpu", lambda: False)
    critic = {"optimizer": {"lr": 1e-5}}
    config = loaded(model, critic=critic, algo={"advantage": "gae"}, reward={"path": str(model)})
    assert set(config.groups["train"].roles) == {"actor", "critic", "reference", "reward"}


@pytest.mark.parametrize(
    "section", [{"cluster": {"devices_per_node": 2}}, {"groups": {"train": {"devices": "0", "roles": {"actor": {}}}}}]
)
def test_a_configuration_that_names_one_device_must_name_all(model: Path, section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(model, **section)
    assert "rollout.devices" in {problem.field for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("hidden", "present", "found"), [(None, True, True), ("", True, False), ("-1", True, False), (None, False, False)]
)
def test_a_hidden_gpu_is_not_used(
    hidden: str | None, present: bool, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    if present:
        (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(default_devices, "_DEVICES", tmp_path)
    assert default_devices._has_gpu() == found


def test_an_unknown_recipe_suggests_the_nearest(model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(model, defaults=["grop"])
    (problem,) = caught.value.problems
    assert (problem.value, "grpo" in problem.fix) == ("grop", True)
