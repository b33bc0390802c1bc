"""Activations that are computed again: the same numbers to the bit, and the right ones twice."""

from __future__ import annotations

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


def _updates(rank: int, directory: Path, layout: Layout, recompute: str) -> dict[str, Any]:
    """Two optimizer steps, and how often the parts of a layer ran forwards."""
    from megarl.data.schedule import update_schedules
    from megarl.megatron.groups import GroupCache
    from megarl.megatron.heads import response_logprobs

    rollouts, infos = random_chunks()
    role = load_role(directory, "actor", layout, rank, GroupCache(), trainable=True, head=None, recompute=recompute)
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

    def loss_of(schedule: Any) -> Any:
        def loss(batch: Any, hidden: torch.Tensor) -> Any:
            logprobs, _ = response_logprobs(role.model, batch, hidden, vocab_size=100, temperature=1.0)
            return -logprobs.sum() / schedule.total_response_tokens, {}

        return loss

    plan = update_schedules(infos, layout, 40, mini_batches=2, epochs=1, seed=0, step=0)
    own = [schedule.ranks[role.coords.dp] for schedule in plan]
    steps = role.update(own, rollouts, loss_of)
    weights = {name: parameter.detach().clone() for name, parameter in role.model.parameters().items()}
    passes = (
        sum(len(schedule.packs) for schedule in own) * len(role.model.chunks) * len(role.model.chunks[0].decoder.layers)
    )
    return {"steps": steps, "weights": weights, "times": {name: number / passes for name, number in calls.items()}}


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2), Layout(tp=2, pp=2, sequence_parallel=True), Layout(pp=2, vpp=2)],
    ids=layout_id,
)
def test_recomputation_changes_no_number(pool: RankPool, tmp_path: Path, layout: Layout) -> None:
    directory = save_model(tmp_path / "model")
    twice = {"none": (1, 1), "selective": (2, 1), "full": (2, 2)}
    found = {kind: pool.run(_updates, directory, layout, kind, world_size=layout.world_size) for kind in twice}
    for kind, (attention, mlp) in twice.items():
        for rank, result in enumerate(found[kind]):
            assert result.pop("times") == {"attention": attention, "mlp": mlp}
            if kind != "none":
                torch.testing.assert_close(result, found["none"][rank], rtol=0, atol=0)
