"""torch's fused Adam, CUDA's choice, which a CPU also has: its updates, and states restored for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megarl.megatron import state
from megarl.megatron.optimizer import OptimizerShard
from megarl.types import Layout
from tests.megatron.test_state import assert_same
from tests.megatron.tiny import save_model
from tests.megatron.training import Snapshot, make_roles, restore, save, snapshot, train
from tests.pool import RankPool

LAYOUT = Layout(tp=2, dp=2, sequence_parallel=True)


def _trained(rank: int, model: Path, dtype: torch.dtype, out: Path) -> tuple[list[Snapshot], list[Snapshot]]:
    """A step by the default and by the fused Adam; three fused steps, at a stretch and by a restored role."""

    def role(*, fused: bool) -> Any:
        with patch.object(torch.nn.Parameter, "is_cuda", fused, create=True):
            made = make_roles(rank, {"actor": model}, {"actor": LAYOUT}, dtype)["actor"]
        groups = made.optimizer.chained.param_groups
        assert {group["fused"] for group in groups} == {True if fused else None}
        return made

    plain, straight, restored = role(fused=False), role(fused=True), role(fused=True)
    train(plain, 0, 1)
    train(straight, 0, 1)
    first = [snapshot(plain), snapshot(straight)]
    save(straight, out)
    train(restored, 7, 2)  # the replaced state is not a fresh one
    restore(restored, out)
    for each in (straight, restored):
        train(each, 1, 2)
    return first, [snapshot(straight), snapshot(restored)]


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fused_adam_steps_as_the_default(pool: RankPool, tmp_path: Path, dtype: torch.dtype) -> None:
    model = save_model(tmp_path / "model")
    for first, resumed in pool.run(_trained, model, dtype, tmp_path / "saved", world_size=LAYOUT.world_size):
        plain, fused = first
        assert plain.adam_steps == fused.adam_steps == {1.0}
        for key, (start, values) in plain.moments.items():
            assert fused.moments[key][0] == start
            torch.testing.assert_close(fused.moments[key][1], values, rtol=1e-6, atol=1e-7, msg=str(key))
        assert_same(*resumed)
        assert resumed[0].adam_steps == {3.0}


@pytest.mark.parametrize("fused", [None, True])
def test_restored_steps_are_where_adam_makes_them(monkeypatch: pytest.MonkeyPatch, fused: bool | None) -> None:
    main = torch.nn.Parameter(torch.empty(3, device="meta"))
    adam = torch.optim.AdamW([main], fused=fused)
    shard = OptimizerShard(name="w", span=range(3), main=main, optimizer=adam)
    monkeypatch.setattr(state, "_shards", lambda _: [shard])
    role: Any = SimpleNamespace(adam_steps=5)
    state._set_adam_steps(role)
    restored = adam.state[main]["step"]
    assert restored.device.type == ("meta" if fused else "cpu")
    assert fused or restored == 5
