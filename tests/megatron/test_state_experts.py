"""Checkpoints of MoE models: every expert is written once and loaded by any rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.types import Layout
from tests.megatron.compare import state_of
from tests.megatron.mixtures import save_mixture
from tests.megatron.training import Snapshot, canonical, make_roles, restore, save, snapshot, train
from tests.pool import RankPool

pytestmark = pytest.mark.dist

LAYOUTS = {
    "pp2-dp2-ep2": Layout(pp=2, dp=2, ep=2),
    "tp2-sp-dp2-ep2": Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
    "pp2-vpp2": Layout(pp=2, vpp=2),
    "dp3-ep3": Layout(dp=3, ep=3),
    "dp4-ep2": Layout(dp=4, ep=2),
    "alone": Layout(),
}


def _rewritten(rank: int, directory: Path, layout: Layout, out: Path) -> None:
    """Reads a model into a role and writes it, as a run does."""
    import torch.distributed as dist

    from megarl.megatron.model_engine import ModelEngine
    from megarl.megatron.parallel import GroupCache
    from megarl.models import model_spec
    from megarl.weights.export import Export, export_plan
    from megarl.weights.hf_files import load_shard, read_config

    spec = model_spec(read_config(directory))
    vocab, dtype = spec.dims.vocab, getattr(torch, spec.dtype)
    role = ModelEngine("actor", spec, layout, rank, GroupCache(), vocab_size=vocab, dtype=dtype, trainable=False)
    role.load(load_shard(role.shard_map, directory, spec.manifest()))
    maps = [spec.megatron_map(layout, other) for other in range(layout.world_size)]
    Export(out, spec.canonical()).run(
        export_plan(maps, spec.canonical()).senders.get(rank),
        role.model.parameters(),
        config=spec.hf_config(),
        template=None,
        lead=rank == 0,
        barrier=dist.barrier,
    )


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_round_trip_bit_for_bit(pool: RankPool, tmp_path: Path, name: str) -> None:
    model = save_mixture(tmp_path / "model", name)
    for label, layout in LAYOUTS.items():
        pool.run(_rewritten, model, layout, tmp_path / label, world_size=layout.world_size)
        found, expected = state_of(tmp_path / label), state_of(model)
        assert found.keys() == expected.keys()
        for tensor, values in expected.items():
            assert torch.equal(found[tensor], values), f"{tensor} by {label}"


def _saved(rank: int, model: Path, layout: Layout, dtype: torch.dtype, out: Path) -> tuple[Snapshot, Snapshot]:
    """A rank's state when it is saved, and after two more steps."""
    role = make_roles(rank, {"actor": model}, {"actor": layout}, dtype)["actor"]
    train(role, 0, 2)
    save(role, out)
    then = snapshot(role)
    train(role, 2, 2)
    return then, snapshot(role)


def _restored(rank: int, model: Path, layout: Layout, dtype: torch.dtype, saved: Path) -> tuple[Snapshot, Snapshot]:
    """The state of a rank with other weights after loading a checkpoint, and after two more steps."""
    role = make_roles(rank, {"actor": model}, {"actor": layout}, dtype)["actor"]
    restore(role, saved)
    then = snapshot(role)
    train(role, 2, 2)
    return then, snapshot(role)


@pytest.mark.parametrize(("written", "dtype"), [("pp2-dp2-ep2", torch.bfloat16), ("tp2-sp-dp2-ep2", torch.float32)])
def test_experts_are_restored_in_any_layout(pool: RankPool, tmp_path: Path, written: str, dtype: torch.dtype) -> None:
    """In the saving layout, the next steps equal those of the uninterrupted run, bit for bit."""
    name = "qwen3_moe_renormalised"
    model, other = (save_mixture(tmp_path / str(seed), name, seed=seed) for seed in (0, 1))
    saved = tmp_path / "actor"
    straight = pool.run(_saved, model, LAYOUTS[written], dtype, saved, world_size=4)
    expected, end = (canonical(held) for held in zip(*straight, strict=True))
    for label, layout in LAYOUTS.items():
        resumed = pool.run(_restored, other, layout, dtype, saved, world_size=layout.world_size)
        found, later = (canonical(held) for held in zip(*resumed, strict=True))
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert torch.equal(found[key], values), f"{key} by {label}"
            if label == written:
                assert torch.equal(later[key], end[key]), f"{key} after two steps"
