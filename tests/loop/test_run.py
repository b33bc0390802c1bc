"""Checks before a run starts its processes, and a trainer's state from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.algos.kl import KLController
from megarl.config import ConfigError, load
from megarl.loop import train
from megarl.plan.run_plan import plan_lines
from megarl.preflight.capacity import capacity
from megarl.preflight.check import check
from megarl.stages.ppo.trainer import PPOTrainer
from tests.loop.test_model_directory import DEBUG


def test_a_run_on_gpus_needs_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    config = load(DEBUG, ["cluster.device=cuda", f"run.dir={directory}"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(
        ConfigError, match=r"cluster.devices_per_node = 4\n    rule: at most the GPUs of this machine, 3"
    ):
        train.train_with_restarts(config)
    assert not directory.exists()


def test_a_multi_node_run_needs_a_cluster_to_start(tmp_path: Path) -> None:
    devices = ["groups.train.devices=0-7", "rollout.devices=8-15", "cluster.devices_per_node=8"]
    config = load(DEBUG, ["cluster.device=cuda", "cluster.nodes=2", *devices, f"run.dir={tmp_path / 'run'}"])
    room = capacity(config)
    assert (room.nbytes, room.shared) == (268 << 30, False), "this machine's GPU says nothing about the cluster's"
    lines = dict(plan_lines(config, check(config)))
    assert lines["devices"] == "8 GPUs on each of 2 nodes, as configured: the cluster was not looked at"
    with pytest.raises(ConfigError, match=r"cluster.nodes = 2\n    rule: several nodes of GPUs need cluster.address"):
        train.train_with_restarts(config)
    assert not (tmp_path / "run").exists()


def test_engines_need_a_vllm_build_for_their_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    config = load(DEBUG, [f"run.dir={directory}"])
    monkeypatch.setattr("megarl.groups.trainers.vllm_device", lambda: "cuda")
    with pytest.raises(ConfigError, match=r"cluster.device = cpu\n    rule: the installed vLLM is built for cuda"):
        train.train_with_restarts(config)
    assert not directory.exists()


class Part:
    """A stateful part of a trainer."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def state(self, *_: Path) -> Any:
        return self.given

    def load(self, state: Any, *_: Path) -> None:
        self.given = state


def ppo(coef: float, values: Any, prompts: Any, texts: Any) -> Any:
    trainer: Any = object.__new__(PPOTrainer)
    trainer._kl = KLController(coef, target=1.0, horizon=10.0)
    trainer._buffer, trainer._updater, trainer._value_norm = Part(prompts), Part(texts), values
    return trainer


def test_ppo_restores_all_of_its_state() -> None:
    state = json.loads(json.dumps(ppo(0.1 + 0.2, {"mean": 1.5}, {"position": 3}, {"epoch": 2}).state(Path())))
    resumed = ppo(0.7, {"mean": 0.0}, {"position": 0}, {"epoch": 0})
    resumed.load(state, Path())
    assert (resumed._kl.coef, resumed._value_norm) == (0.1 + 0.2, {"mean": 1.5})
    assert (resumed._buffer.given, resumed._updater.given) == ({"position": 3}, {"epoch": 2})
    assert resumed.state(Path()) == state
