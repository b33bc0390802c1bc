"""A gradient that is not finite skips the step on every rank, and too many in a row end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.megatron.loss_metrics import LossMetrics
from megarl.types import Layout
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role, save_model
from tests.pool import RankPool

LAYOUT = Layout(tp=2, pp=2)


def _updates(rank: int, directory: Path, broken: list[bool]) -> dict[str, Any]:
    """One optimizer step per entry; the loss of a broken one is NaN."""
    from megarl.data.schedule import update_schedules
    from megarl.megatron.heads import response_logprobs
    from megarl.megatron.parallel import GroupCache

    rollouts, infos = random_chunks()
    role = load_role(directory, "actor", LAYOUT, rank, GroupCache(), trainable=True, head=None)
    role.start_training(Optimizer(lr=1e-3), total_steps=len(broken))
    schedule = update_schedules(infos, LAYOUT, 40, mini_batches=1, epochs=1, seed=0, step=0)
    steps, moved = [], []
    for is_broken in broken:

        def loss(batch: Any, hidden: torch.Tensor, factor: float = float("nan") if is_broken else 1.0) -> Any:
            logprobs, _ = response_logprobs(role.model, batch, hidden, vocab_size=100, temperature=1.0)
            return -factor * logprobs.sum() / 100, LossMetrics()

        before = {name: parameter.detach().clone() for name, parameter in role.model.parameters().items()}
        steps += role.update([s.ranks[0] for s in schedule], rollouts, lambda _schedule, chosen=loss: chosen)
        after = role.model.parameters()
        moved.append(any(not torch.equal(before[name], after[name]) for name in before))
    return {"skipped": [step["skipped"] for step in steps], "moved": moved}


@pytest.mark.dist
def test_a_non_finite_step_is_skipped_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    broken = [False, True, True, False, True, True, False]
    for result in pool.run(_updates, save_model(tmp_path / "model"), broken, world_size=4):
        assert result["skipped"] == [float(b) for b in broken]
        assert result["moved"] == [not b for b in broken]


@pytest.mark.dist
def test_consecutive_non_finite_steps_end_the_run(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the gradient was not finite in 3 optimizer steps in a row; lower actor"):
        pool.run(_updates, save_model(tmp_path / "model"), [False, True, True, True], world_size=4)
