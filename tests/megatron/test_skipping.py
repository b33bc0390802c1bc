"""A loss or a gradient that is not finite, on any rank, skips the optimizer step on every rank and changes nothing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.data.schedule import update_schedules
from megarl.megatron.heads import response_logprobs
from megarl.megatron.loss_metrics import LossMetrics
from megarl.types import Layout
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role, save_model
from tests.megatron.training import differing, snapshot
from tests.pool import RankPool

Fault = Literal["gradient", "NaN", "infinite"]
"""A NaN in a gradient of rank 0, a loss of NaN, or an infinite loss with a finite gradient, of the first replica."""

LAYOUTS = {
    "TP2 x PP2": (Layout(tp=2, pp=2), torch.float32),
    "TP2 x DP2 with SP": (Layout(tp=2, dp=2, sequence_parallel=True), torch.bfloat16),
    "PP2 x DP2": (Layout(pp=2, dp=2), torch.float32),
}
FAULTS: list[Fault | None] = [None, "gradient", "NaN", None, "infinite", None]
RATES = [6e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3]
"""A linear schedule, which goes on in skipped steps."""
_SUMMANDS: dict[Fault | None, float] = {"NaN": float("nan"), "infinite": float("inf")}


def _updates(rank: int, directory: Path, layout: Layout, dtype: torch.dtype) -> list[tuple[bool, bool, float, float]]:
    """Takes an optimizer step per fault; returns what it reports, and whether anything in the role has changed."""
    rollouts, infos = random_chunks()
    role = load_role(directory, "actor", layout, rank, trainable=True, dtype=dtype)
    role.start_training(Optimizer(lr=6e-3, schedule="linear"), total_steps=6, decay=0.9)
    schedule = update_schedules(infos, layout, 40, mini_batches=1, epochs=1, seed=0, step=0)
    results = []
    for fault in FAULTS:

        def loss(batch: Any, hidden: torch.Tensor, fault: Fault | None = fault) -> Any:
            logprobs, _ = response_logprobs(role.model, batch, hidden, temperature=1.0)
            added = _SUMMANDS.get(fault, 0.0) if role.coords.dp == 0 else 0.0
            return -logprobs.sum() / 100 + added, LossMetrics()

        before = snapshot(role)
        with ExitStack() as hooks:
            if fault == "gradient" and rank == 0:
                parameter = next(iter(role.model.parameters().values()))
                hook = parameter.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))
                hooks.callback(hook.remove)
            own = [s.ranks[role.coords.dp] for s in schedule]
            (step,) = role.update(own, rollouts, lambda _schedule, chosen=loss: chosen)
        results.append((bool(step["skipped"]), _moved(before, snapshot(role)), step["lr"], step["grad_norm"]))
    assert (role.steps_taken, role.adam_steps) == (6, 3)
    return results


def _moved(before: Any, after: Any) -> bool:
    """Whether weights, moments, the average or Adam's steps differ; all or none of them do."""
    (moved,) = set(differing(before, after).values())
    return moved


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_non_finite_step_changes_nothing_on_any_rank(
    pool: RankPool, tmp_path: Path, layout: Layout, dtype: torch.dtype
) -> None:
    ranks = pool.run(_updates, save_model(tmp_path / "model"), layout, dtype, world_size=4)
    for reported in ranks:
        skipped, moved, rates, norms = zip(*reported, strict=True)
        assert skipped == tuple(fault is not None for fault in FAULTS)
        assert moved == tuple(fault is None for fault in FAULTS)
        assert rates == pytest.approx(RATES)
        assert [torch.tensor(norm).isfinite().item() for norm in norms] == [fault is None for fault in FAULTS]
