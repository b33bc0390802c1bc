"""Recomputed activations: bit-exact results, and only the configured parts run twice. Updates in bfloat16."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.types import Layout
from tests.megatron.samples import random_chunks
from tests.megatron.test_parity import layout_id
from tests.megatron.tiny import load_role, save_model
from tests.pool import RankPool


def counted_updates(
    rank: int, directory: Path, layout: Layout, recompute: str, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Two optimizer steps, how often the parts of a layer ran forwards, and in what gradients and state are kept."""
    from megarl.data.schedule import update_schedules
    from megarl.megatron.parallel import GroupCache
    from megarl.megatron.supervised_losses import text_loss

    rollouts, infos = random_chunks()
    role = load_role(
        directory, "actor", layout, rank, GroupCache(), trainable=True, head=None, dtype=dtype, recompute=recompute
    )
    role.start_training(Optimizer(lr=1e-3), total_steps=2)
    calls = {"attention": 0, "mlp": 0}

    def count(name: str) -> Any:
        def called(*_: Any) -> None:
            calls[name] += 1

        return called

    for chunk in role.model.chunks:
        for layer in chunk.decoder.layers:
            layer.self_attention.core_attention.register_forward_hook(count("attention"))
            layer.mlp.register_forward_hook(count("mlp"))

    plan = update_schedules(infos, layout, 40, mini_batches=2, epochs=1, seed=0, step=0)
    own = [schedule.ranks[role.coords.dp] for schedule in plan]
    steps = role.update(own, rollouts, partial(text_loss, role))
    weights = {name: parameter.detach().cpu().clone() for name, parameter in role.model.parameters().items()}
    passes = (
        sum(len(schedule.packs) for schedule in own) * len(role.model.chunks) * len(role.model.chunks[0].decoder.layers)
    )
    return {
        "steps": steps,
        "weights": weights,
        "times": {name: number / passes for name, number in calls.items()},
        "gradients": {parameter.main_grad.dtype for parameter in role.model.parameters().values()},
        "state": {tensor.dtype for tensor in role.optimizer.state()},
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, pp=2, sequence_parallel=True), Layout(pp=2, vpp=2)],
    ids=layout_id,
)
def test_recomputation_is_bit_exact(pool: RankPool, tmp_path: Path, layout: Layout) -> None:
    directory = save_model(tmp_path / "model")
    twice = {"none": (1, 1), "selective": (2, 1), "full": (2, 2)}
    found = {kind: pool.run(counted_updates, directory, layout, kind, world_size=layout.world_size) for kind in twice}
    for kind, (attention, mlp) in twice.items():
        for rank, result in enumerate(found[kind]):
            assert result["times"] == {"attention": attention, "mlp": mlp}
            if kind != "none":
                for what in ("steps", "weights"):
                    torch.testing.assert_close(result[what], found["none"][rank][what], rtol=0, atol=0)


@pytest.mark.dist
def test_bfloat16_reduces_gradients_and_keeps_state_in_float32(pool: RankPool, tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    half, full = (
        pool.run(counted_updates, directory, Layout(dp=2), "none", dtype, world_size=2)
        for dtype in (torch.bfloat16, torch.float32)
    )
    for one, other in zip(half, full, strict=True):
        assert {tensor.dtype for tensor in one["weights"].values()} == {torch.bfloat16}
        assert one["gradients"] == one["state"] == {torch.float32}
        check_half_precision(one["steps"], other["steps"])


def check_half_precision(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Against the same steps in float32: bfloat16 has eight bits, and the errors of some tens of tokens cancel."""
    for got, want in zip(found, expected, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-2)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=5e-2)
