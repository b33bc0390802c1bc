"""Checks before a run starts its processes; what supervised trainers ask for, and trainers' state from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.algos.kl import KLController
from megarl.algos.reward_shaping import ScoreScale
from megarl.cluster.ray_worker import ChunkRefs
from megarl.config import ConfigError, TrainingConfig, load
from megarl.data.training_texts import TrainingText
from megarl.loop import train
from megarl.megatron.worker import MegatronWorker
from megarl.plan.run_plan import plan_lines
from megarl.preflight.capacity import capacity
from megarl.preflight.check import check
from megarl.stages.ppo.trainer import PPOTrainer
from tests.config.debug import DEBUG
from tests.loop.answers import Answered, answer, run


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


def supervised(monkeypatch: pytest.MonkeyPatch, stage: str, responses: int, *overrides: str) -> Any:
    """The trainer of a stage, without its processes, on six rows with two tokens of prompt and three of response."""
    config = load(f"configs/debug/{stage}.yaml", overrides)
    assert isinstance(config, TrainingConfig)
    (role,) = config.trained
    launched = SimpleNamespace(roles={role: SimpleNamespace(name=role, layout=config.layout(role))})
    monkeypatch.setattr(ChunkRefs, "put", lambda chunks: chunks)
    monkeypatch.setattr("megarl.loop.supervised.launch_trainers", lambda *_: launched)
    ids = np.arange(5, dtype=np.int32)
    rows = [
        TrainingText(key=str(row), prompt_ids=ids[:2] + row, responses=(ids[2:], ids[:3])[:responses])
        for row in range(6)
    ]
    data: Any = SimpleNamespace(rows={"data.train": rows, "data.evaluation": rows})
    return train.trainer_class(config)(config, None, "model", data, lambda _: None)


@pytest.mark.parametrize(("loss_on", "trained"), [("response", 3), ("all", 4)])
def test_fine_tuning_learns_the_tokens_that_are_configured(
    monkeypatch: pytest.MonkeyPatch, loss_on: str, trained: int
) -> None:
    trainer = supervised(monkeypatch, "sft", 1, f"data.loss_on={loss_on}")
    _, _, schedule = trainer._batch(trainer._rows.next(4))
    rows = [row for rank in schedule.ranks for pack in rank.packs for row in pack]
    assert [(row.tokens, row.response_tokens) for row in rows] == [(5, trained)] * 4
    assert {rank.total_response_tokens for rank in schedule.ranks} == {4 * trained}


def test_the_responses_of_a_preference_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = supervised(monkeypatch, "reward_model", 2, "normalisation=null", "rollout=null")
    samples, _, schedule = trainer._batch(trainer._rows.next(4))
    packs = [[(row.chunk, row.row) for row in pack] for rank in schedule.ranks for pack in rank.packs]
    for pack in packs:
        assert [(chunk, row + 1) for chunk, row in pack[0::2]] == pack[1::2]
    assert sum(map(len, packs)) == len(samples) == 8
    assert {(rank.rows_per_unit, rank.total_rows) for rank in schedule.ranks} == {(2, 8)}


def test_a_resumed_supervised_run_continues_with_the_next_row(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, resumed = (supervised(monkeypatch, "sft", 1) for _ in range(2))
    whole._rows.next(8)
    resumed.load(json.loads(json.dumps(whole.state(Path()))), Path())
    assert [row.key for row in resumed._rows.next(6)] == [row.key for row in whole._rows.next(6)]


class Head:
    """A role that notes what is asked of it."""

    name = "reward"

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def call(self, method: Any, *args: Any) -> Answered:
        self.asked.append((method, *args))
        return Answered()


def test_the_head_is_scaled_before_the_first_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = supervised(monkeypatch, "reward_model", 2, "normalisation=null", "rollout=null")
    trainer._role = head = Head()
    trainer._normalisation = SimpleNamespace(before=True)
    trainer._reference_scale = lambda: answer(ScoreScale(mean=3.0, std=4.0))
    assert run(trainer.begin(0)) == {"normalisation/before_mean": 3.0, "normalisation/before_std": 4.0}
    assert head.asked == [(MegatronWorker.scale_head, 0.25)]
    assert run(trainer.begin(2)) == {}, "the checkpoint has the scaled head"
    assert len(head.asked) == 1


def test_statistics_compare_the_responses_of_each_held_out_preference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = supervised(monkeypatch, "reward_model", 2, "normalisation=null", "rollout=null")
    trainer._role = Head()
    scores = {f"{row}/0/{place}": score for row in range(6) for place, score in enumerate((row, 2))}
    trainer._scores = lambda samples, _: answer(np.float32([scores[sample.sample_id] for sample in samples]))
    metrics = run(trainer.finish(tmp_path))
    assert metrics["held_out/accuracy"] == 0.5, "3, 4 and 5 are above 2"
    assert (metrics["held_out/chosen_mean"], metrics["held_out/rejected_mean"]) == (2.5, 2.0)
