"""The learning rate schedule, by hand; the steps it makes; and a forward pass for metrics only."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.data.schedule import inference_schedule, update_schedules
from megarl.megatron.optimizer import learning_rate
from megarl.megatron.supervised_losses import text_loss
from megarl.types import Layout
from tests.megatron.compare import samples_of, state_of
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role, save_model
from tests.oracle import models
from tests.oracle.adam import Adam, AdamSettings
from tests.pool import RankPool


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"schedule": "constant"}, [8, 8, 8, 8, 8, 8, 8, 8]),
        ({"schedule": "constant", "warmup": 0.375}, [2, 4, 6, 8, 8, 8, 8, 8]),
        ({"schedule": "linear"}, [8, 7, 6, 5, 4, 3, 2, 1]),
        ({"schedule": "linear", "final_lr": 4.0, "warmup": 0.5}, [1.6, 3.2, 4.8, 6.4, 8, 7, 6, 5]),
        ({"schedule": "cosine", "warmup": 0.5}, [1.6, 3.2, 4.8, 6.4, 8, 4 + 8**0.5, 4, 4 - 8**0.5]),
        ({"schedule": "cosine", "final_lr": 6.0, "warmup": 0.75}, [8 / 7 * k for k in range(1, 7)] + [8, 7]),
        ({"schedule": "anneal"}, [8, 8, 6, 6, 4, 4, 2, 2]),
        ({"schedule": "anneal", "warmup": 0.25}, [8 / 3, 16 / 3, 6, 6, 4, 4, 2, 2]),
    ],
)
def test_schedules_by_hand(fields: dict[str, Any], expected: list[float]) -> None:
    settings = Optimizer(lr=8.0, **fields)
    rates = [learning_rate(settings, step, total=8, together=2) for step in range(8)]
    assert rates == pytest.approx(expected)


def test_steps_after_the_last_have_the_final_rate() -> None:
    assert learning_rate(Optimizer(lr=8.0, schedule="cosine", final_lr=2.0), 11, total=10) == 2.0
    assert learning_rate(Optimizer(lr=8.0, schedule="cosine", warmup=0.9, final_lr=2.0), 1, total=1) == 2.0
    assert learning_rate(Optimizer(lr=8.0, schedule="anneal"), 9, total=8, together=2) == 2.0


SETTINGS = Optimizer(lr=8e-3, schedule="linear", warmup=0.5, eps=1e-4, clip_grad=None)
RATES = [8e-3 / 3, 16e-3 / 3, 8e-3, 4e-3]


TENSORFLOW = SETTINGS.model_copy(update={"adam": "tensorflow", "betas": (0.9, 0.999)})
"""The second moment's correction is far from 1 in the first steps."""


def _train(rank: int, directory: Path, layout: Layout, settings: Optimizer) -> dict[str, Any]:
    """Four steps on the same samples; before each, the same loss without a step."""
    rollouts, infos = random_chunks()
    role = load_role(directory, "actor", layout, rank, trainable=True)
    role.start_training(settings, total_steps=4)
    (plan,) = update_schedules(infos, layout, 40, mini_batches=1, epochs=1, seed=0, step=0)
    evaluation = inference_schedule(infos, layout, 60).ranks[role.coords.dp]
    make_loss = partial(text_loss, role)
    steps, evaluated = [], []
    for _ in range(4):
        evaluated.append(role.evaluate(evaluation, rollouts, make_loss))
        steps += role.update([plan.ranks[role.coords.dp]], rollouts, make_loss)
    assert role.steps_taken == 4
    return {"steps": steps, "evaluated": evaluated, "last_stage": role.coords.pp == layout.pp - 1}


def _losses(directory: Path, settings: Optimizer) -> list[float]:
    """The same with Hugging Face's model, and Adam by its formulas."""
    model = models.causal_lm(json.loads((directory / "config.json").read_text()), state_of(directory))
    naive = AdamSettings(
        lr=1.0,
        betas=settings.betas,
        eps=settings.eps,
        clip_grad=None,
        tensorflow=settings.adam == "tensorflow",
        schedule=RATES.__getitem__,
    )
    adam = Adam(model, naive)
    samples = samples_of(*random_chunks())
    losses = []
    for _ in RATES:
        model.zero_grad()
        loss = -torch.cat([models.token_statistics(model, sample, 1.0)[0] for sample in samples]).mean()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "settings"),
    [(Layout(tp=2, pp=2), SETTINGS), (Layout(dp=2, pp=2, vpp=2), SETTINGS), (Layout(tp=2, dp=2), TENSORFLOW)],
    ids=["TP2 x PP2", "PP2 interleaved x DP2", "TensorFlow's epsilon"],
)
def test_steps_use_the_scheduled_rate_and_evaluation_does_not_advance_it(
    pool: RankPool, tmp_path: Path, layout: Layout, settings: Optimizer
) -> None:
    directory = save_model(tmp_path / "model")
    expected = _losses(directory, settings)
    if settings is TENSORFLOW:
        assert expected[-1] != pytest.approx(_losses(directory, SETTINGS)[-1], rel=1e-2), "it does not matter here"
    for result in pool.run(_train, directory, layout, settings, world_size=layout.world_size):
        assert [step["lr"] for step in result["steps"]] == pytest.approx(RATES)
        if not result["last_stage"]:
            assert result["evaluated"] == [{}] * 4
            continue
        assert [step["loss"] for step in result["steps"]] == pytest.approx(expected, rel=2e-4)
        for step, evaluation in zip(result["steps"], result["evaluated"], strict=True):
            assert evaluation.keys() == {"loss", "entropy"}
            assert evaluation == pytest.approx({name: step[name] for name in evaluation}, rel=1e-5)
