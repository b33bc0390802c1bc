"""Steps of supervised fine-tuning and of the reward model: a job of the rank pool, and the naive ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.types import Layout, RoleName, SampleInfo
from tests.megatron.compare import adam_of, check, samples_of, state_of, trained
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role, random_head
from tests.oracle import models, ppo, supervised

CENTERING = 0.05
SETTINGS = Optimizer(lr=1e-3, eps=1e-4, weight_decay=0.1, clip_grad=1.0)

Naive = tuple[list[ppo.Step], torch.nn.Module]
Outcome = tuple[dict[str, float], dict[str, Any]]


def _batches() -> tuple[list[Any], list[list[SampleInfo]]]:
    """Chunks of two rows, and two steps of three chunks each."""
    chunks, infos = random_chunks(chunks=6, rows=2)
    return chunks, [infos[:6], infos[6:]]


def sft(role: Any) -> Any:
    from megarl.megatron.supervised_losses import text_loss

    return partial(text_loss, role)


def preferences(role: Any) -> Any:
    from megarl.config.schema.training_sections import PREFERENCE_LOSSES
    from megarl.megatron.supervised_losses import PreferenceLoss

    return partial(PreferenceLoss, role, PREFERENCE_LOSSES("pairwise", centering=CENTERING), {})


def two_steps(
    rank: int, directory: Path, name: RoleName, layout: Layout, budget: int, make_loss: Callable[[Any], Any]
) -> Outcome:
    """The loss before the first step, by a forward pass alone; and both steps."""
    from megarl.data.schedule import step_schedule
    from megarl.megatron.parallel import GroupCache

    chunks, batches = _batches()
    head, per_unit = (None, 1) if name == "actor" else (random_head(directory), 2)
    role = load_role(directory, name, layout, rank, GroupCache(), trainable=True, head=head)
    role.start_training(SETTINGS, total_steps=len(batches))
    plans = [step_schedule(batch, layout, budget, rows_per_unit=per_unit) for batch in batches]
    own = [plan.ranks[role.coords.dp] for plan in plans]
    before = role.evaluate(own[0], chunks, make_loss(role))
    return before, trained(role, role.update(own, chunks, make_loss(role)))


def fine_tuned(directory: Path) -> Naive:
    """The naive steps of the model in a directory."""
    chunks, batches = _batches()
    actor = models.causal_lm(_config(directory), state_of(directory))
    return supervised.fine_tune(actor, [samples_of(chunks, batch) for batch in batches], adam_of(SETTINGS))


def rewarded(directory: Path) -> Naive:
    """The naive steps of a reward model on the body of the model in a directory."""
    chunks, batches = _batches()
    reward = models.headed_model(_config(directory), headed_state(directory))
    samples = [samples_of(chunks, batch) for batch in batches]
    pairs = [
        [supervised.Preference(responses=pair) for pair in zip(batch[0::2], batch[1::2], strict=True)]
        for batch in samples
    ]
    return supervised.train_reward(reward, pairs, adam_of(SETTINGS), supervised.pairwise(centering=CENTERING))


def headed_state(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of the model in a directory, with a head in place of its output layer."""
    body = {name: tensor for name, tensor in state_of(directory).items() if name != "lm_head.weight"}
    return {**body, "score.weight": random_head(directory)}


def check_steps(results: list[Outcome], naive: Naive, start: dict[str, torch.Tensor]) -> None:
    """All ranks against the naive steps, from the same start."""
    check([own for _, own in results], *naive, start)
    for before, own in results:
        if own["reports"]:
            first = {name: own["steps"][0][name] for name in before}
            assert before == pytest.approx(first, rel=1e-6), "a forward pass tells what the step tells"


def _config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())
