"""Checks before a run starts its processes, what ends its steps, and a trainer's state from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.algos.kl import KLController
from megarl.config import ConfigError, TrainingConfig, load
from megarl.errors import RunError
from megarl.loop import train
from megarl.plan.run_plan import plan_lines
from megarl.preflight.capacity import capacity
from megarl.preflight.check import check
from megarl.run.directory import RunDirectory
from megarl.run.report import Reporter
from megarl.run.results import StepResult
from megarl.stages.ppo.trainer import PPOTrainer
from tests.loop.answers import run
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


class Steps:
    """A trainer whose steps have given metrics, and the steps that were saved."""

    evaluate_every = None

    def __init__(self, *metrics: dict[str, float]) -> None:
        self.metrics, self.saved = metrics, list[int]()

    async def begin(self, _step: int) -> dict[str, float]:
        return {}

    async def step(self, step: int) -> StepResult:
        own = self.metrics[step - 1]
        updates = [{name: value for name, value in own.items() if name.startswith("policy/")}]
        return StepResult(step=step, metrics={"time/step": 1.0, **own}, updates=updates)

    async def evaluate(self, _step: int) -> None:
        return None

    async def evaluations(self, *, wait: bool) -> tuple[()]:
        return ()


def end_of(trainer: Steps, directory: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> str:
    """Trains with these steps; returns the error that ends it."""

    @contextmanager
    def started(config: TrainingConfig, _data: Any, directory: RunDirectory, *_: Any) -> Iterator[Any]:
        async def nothing() -> None: ...

        async def save(step: int) -> None:
            trainer.saved.append(step)

        with Reporter(config, directory, 0) as reporter:
            saver = SimpleNamespace(save=save, check=nothing, wait=nothing, expected_s=0.0)
            yield SimpleNamespace(run=run), trainer, reporter, saver

    monkeypatch.setattr(train, "_checked", lambda config: (config, None))
    monkeypatch.setattr(train, "_started", started)
    monkeypatch.setattr("megarl.run.directory.digest_frozen_weights", lambda _config: {})
    config = load(DEBUG, [f"run.dir={directory}", f"run.steps={len(trainer.metrics)}", *overrides])
    assert isinstance(config, TrainingConfig)
    with pytest.raises(RunError) as caught:
        train.train_with_restarts(config)
    return str(caught.value)


def test_a_finding_ends_a_run_after_a_checkpoint_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Steps(*({"objective/kl": 31.0 * (step > 3)} for step in range(1, 10)))
    settings = ["health={limits: {objective/kl: 30}, stop: [objective/kl]}"]
    assert end_of(trainer, tmp_path, monkeypatch, *settings).startswith("health.stop: objective/kl is 31, above 30")
    assert trainer.saved == [6]


def test_skipped_steps_end_a_run_without_a_checkpoint_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Steps(*({"policy/skipped": float(step in (2, 5, 6, 7))} for step in range(1, 10)))
    error = end_of(trainer, tmp_path, monkeypatch, "checkpoint.every=2", "health.stop=[skipped]")
    assert error.startswith("health.stop: updates were skipped (policy)")
    assert trainer.saved == [2], "a check that stops the run comes first"
    trainer.saved.clear()
    error = end_of(trainer, tmp_path / "again", monkeypatch, "checkpoint.every=2")
    assert error.startswith("policy: the loss or the gradient was not finite in 3 optimizer steps in a row")
    assert trainer.saved == [2, 4, 6]
    assert len((tmp_path / "again" / "metrics.jsonl").read_text().splitlines()) == 7
