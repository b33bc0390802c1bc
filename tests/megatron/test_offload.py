"""Offloaded roles: released memory, refused calls, and unchanged numbers."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.data.schedule import inference_schedule, update_schedules
from megarl.megatron import offload
from megarl.megatron.offload import host_sizes
from megarl.megatron.parallel import GroupCache
from megarl.megatron.state import plan_save, restore_role
from megarl.megatron.supervised_losses import text_loss
from megarl.megatron.worker import Offloader
from megarl.types import Layout
from tests.megatron.compare import logprobs_by_chunk
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role, save_model
from tests.pool import RankPool

LAYOUT = Layout(tp=2, pp=1, dp=2, sequence_parallel=True)
SETTINGS = Optimizer(lr=1e-2, weight_decay=0.1)


def loss_of(role: Any, seen: Any = lambda: None) -> Any:
    """A loss of texts, which calls ``seen`` in each micro-batch."""

    def make_loss(schedule: Any) -> Any:
        loss = text_loss(role, schedule)
        return lambda batch, hidden: (seen(), loss(batch, hidden))[1]

    return make_loss


def _nbytes(tensors: Any) -> int:
    """Of the memory behind tensors."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _training(rank: int, directory: Path, dtype: torch.dtype, *, turns: bool) -> dict[str, Any]:
    """Three updates of an actor, and its log-probabilities; between them another role works, or does not."""
    rollouts, infos = random_chunks()
    cache = GroupCache()
    make = {"directory": directory, "layout": LAYOUT, "rank": rank, "cache": cache, "head": None, "dtype": dtype}
    actor = load_role(name="actor", trainable=True, **make)
    other = load_role(name="reference", trainable=False, **make)
    actor.start_training(SETTINGS, total_steps=3, decay=0.9)
    held = {name: parameter.data for name, parameter in actor.model.parameters().items()}
    (plan,) = update_schedules(infos, LAYOUT, 40, mini_batches=1, epochs=1, seed=0, step=0)
    own, inference = plan.ranks[actor.coords.dp], inference_schedule(infos, LAYOUT, 40).ranks[actor.coords.dp]
    taking = Offloader({"actor": actor, "reference": other}, {"actor", "reference"} if turns else ())
    steps, passes, released = [], [], []
    for _ in range(3):
        if turns:
            with _moved() as weights:
                _check_weights_suffice(taking, actor, passes, inference, own, rollouts)
            with _moved() as rest:
                taking.onload("actor")
            assert not weights & rest, "a storage was moved twice"
        else:
            passes.append(logprobs_by_chunk(actor, inference, rollouts, 1.0))
        steps += taking.onload("actor").update([own], rollouts, loss_of(actor))
        gradients = actor.optimizer._gradient_buffers()
        parameters = [*actor.model.parameters().values()]
        state = [*actor.optimizer.state(), *actor.ema.values.values()]
        before = _nbytes([*parameters, *state])
        taking.onload("reference").logprobs(inference, rollouts, 1.0)
        released.append({"before": before, "after": _nbytes([*parameters, *state]), "gradients": _nbytes(gradients)})
        if turns:
            _check_use_fails(actor, inference, own, rollouts)
    passes.append(logprobs_by_chunk(taking.onload("actor", weights_only=True), inference, rollouts, 1.0))
    taking.offload_all()
    taking.offload_all()
    taking.onload("actor", "reference")
    other.model.require_memory()
    return {
        "steps": steps,
        "logprobs": [None if one is None else {i: rows.values.copy() for i, rows in one.items()} for one in passes],
        "held": {name: tensor.clone() for name, tensor in held.items()},
        "state": [tensor.detach().clone() for tensor in (*actor.optimizer.state(), *actor.ema.values.values())],
        "released": released,
    }


@contextmanager
def _moved() -> Iterator[set[int]]:
    """The storages that get memory again in the block; they may not get it twice."""
    storages: set[int] = set()
    restore = offload.HostCopy.restore

    def restored(copy: offload.HostCopy) -> None:
        found = {storage._cdata for storage, _ in copy.parts}
        assert not storages & found
        storages.update(found)
        restore(copy)

    with patch.object(offload.HostCopy, "restore", restored):
        yield storages


def _check_weights_suffice(taking: Offloader, actor: Any, passes: Any, inference: Any, own: Any, rollouts: Any) -> None:
    """A forward pass of a role that is away brings its weights alone, and the role may go and come again."""
    taking.onload("reference")
    for _ in range(2):
        taking.onload("actor", weights_only=True)
        weights = [*actor.model.parameters().values()]
        held = {weight.untyped_storage()._cdata for weight in weights}
        state = [*actor.optimizer.state(), *actor.ema.values.values()]
        rest = [tensor for tensor in state if tensor.untyped_storage()._cdata not in held]
        assert _nbytes(weights) > 0
        assert rest
        assert _nbytes(rest) == 0
    passes.append(logprobs_by_chunk(actor, inference, rollouts, 1.0))
    for use in (
        lambda: actor.update([own], rollouts, loss_of(actor)),
        lambda: plan_save(actor, Path("nowhere")),
        lambda: restore_role(actor, Path("nowhere")),
        lambda: actor.scale_head(1.0),
    ):
        with pytest.raises(RuntimeError, match="its optimizer state has no memory; onload it first"):
            use()


def _check_use_fails(actor: Any, inference: Any, own: Any, rollouts: Any) -> None:
    for use in (
        lambda: actor.logprobs(inference, rollouts, 1.0),
        lambda: actor.update([own], rollouts, loss_of(actor)),
        lambda: actor.evaluate(own, rollouts, loss_of(actor)),
        lambda: actor.model.parameters(),
    ):
        with pytest.raises(RuntimeError, match="offloaded"):
            use()
    linear = next(p for name, p in actor.model.chunks[0].named_parameters() if name.endswith("linear_fc1.weight"))
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(torch.ones(1, linear.shape[1], dtype=linear.dtype), linear)


def _both(rank: int, directory: Path, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    return _training(rank, directory, dtype, turns=True), _training(rank, directory, dtype, turns=False)


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offloading_is_bit_exact(pool: RankPool, tmp_path: Path, dtype: torch.dtype) -> None:
    for turns, alone in pool.run(_both, save_model(tmp_path / "model"), dtype, world_size=4):
        released, kept = turns.pop("released"), alone.pop("released")
        for taken, stayed in zip(released, kept, strict=True):
            assert taken["before"] == stayed["before"] == stayed["after"] > 0
            assert taken["after"] == 0
            assert taken["gradients"] == stayed["gradients"] == 0
        torch.testing.assert_close(turns, alone, rtol=0, atol=0, equal_nan=False)
        assert any(step["grad_norm"] > 0 for step in turns["steps"])


def _resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _memory(rank: int, directory: Path) -> dict[str, int]:
    rollouts, infos = random_chunks()
    actor = load_role(directory, "actor", Layout(), rank, trainable=True)
    actor.start_training(SETTINGS, total_steps=3)
    (plan,) = update_schedules(infos, Layout(), 1000, mini_batches=1, epochs=1, seed=0, step=0)
    seen: list[int] = []
    actor.update(plan.ranks, rollouts, loss_of(actor))  # makes Adam's state
    actor.update(plan.ranks, rollouts, loss_of(actor, lambda: seen.append(_resident())))
    idle = _resident()
    released = actor.offload()
    away = _resident()
    return {
        "gradients": sum(buffer.nbytes for buffer in actor.optimizer._gradient_buffers()),
        "freed after the update": seen[0] - idle,
        "released": released,
        "grown by offloading": away - idle,
    }


@pytest.mark.dist
def test_offloaded_memory_is_returned_to_the_system(pool: RankPool, tmp_path: Path) -> None:
    """On a CPU host memory is the same memory: offloading moves within it, where a copy would double it.

    The one large parameter is above the size from which the C library returns a block as soon as it is freed, 32 MiB.
    """
    directory = save_model(tmp_path / "model", vocab_size=300_000, num_hidden_layers=1, tie_word_embeddings=True)
    (found,) = pool.run(_memory, directory, world_size=1)
    assert found["gradients"] > 38e6
    assert found["freed after the update"] > 0.9 * found["gradients"]
    assert found["released"] > 2.9 * found["gradients"]
    assert abs(found["grown by offloading"]) < 0.1 * found["released"]


def _frozen(rank: int, directory: Path, frozen: bool) -> dict[str, Any]:
    """The values of a role that is offloaded and comes back, twice, and the shared memory that this rank has mapped."""
    rollouts, infos = random_chunks()
    role = load_role(directory, "reference", LAYOUT, rank, frozen=frozen)
    schedule = inference_schedule(infos, LAYOUT, 40).ranks[role.coords.dp]
    passes = []
    for _ in range(3):
        found = logprobs_by_chunk(role, schedule, rollouts, 1.0)
        passes.append(None if found is None else {chunk: rows.values.copy() for chunk, rows in found.items()})
        assert role.offload() > 0
        assert role.offload() == 0
        assert _nbytes(role.model.chunks[0].parameters()) == 0
        role.onload(weights_only=True)
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = {line.split()[4] for line in maps if "memfd:megarl-recv" in line}
    return {"passes": passes, "shared": shared, "weights": (role.coords.tp, role.coords.pp)}


@pytest.mark.dist
def test_a_frozen_roles_copy_is_shared_by_its_replicas(pool: RankPool, tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    alone = pool.run(_frozen, directory, False, world_size=LAYOUT.world_size)
    found = pool.run(_frozen, directory, True, world_size=LAYOUT.world_size)
    memory: dict[Any, set[str]] = {}
    for result, usual in zip(found, alone, strict=True):
        torch.testing.assert_close(result["passes"], [usual["passes"][0]] * 3, rtol=0, atol=0)
        (inode,) = result["shared"] - usual["shared"]
        memory.setdefault(result["weights"], set()).add(inode)
    assert [len(inodes) for inodes in memory.values()] == [1, 1]
    assert len(set.union(*memory.values())) == 2


def _refused(rank: int, directory: Path, function: str, error: Exception) -> set[str]:
    with patch.object(offload, function, side_effect=error):
        return _frozen(rank, directory, True)["shared"]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("function", "error"), [("map_host", ValueError("forbidden")), ("HostRecvBuffer", MemoryError("no room"))]
)
def test_replicas_that_cannot_share_memory_keep_copies(
    pool: RankPool, tmp_path: Path, function: str, error: Exception
) -> None:
    directory = save_model(tmp_path / "model")
    before = pool.run(_frozen, directory, False, world_size=LAYOUT.world_size)
    found = pool.run(_refused, directory, function, error, world_size=LAYOUT.world_size)
    assert [shared - earlier["shared"] for shared, earlier in zip(found, before, strict=True)] == [set()] * 4


def _refused_by_cuda(rank: int) -> tuple[bool, list[str]]:
    """Whether ranks share, where the second one may not register the memory, and a rank's calls of CUDA."""
    import torch.distributed as dist

    calls: list[str] = []

    def call(name: str, *_: object) -> None:
        calls.append(name)
        if rank == 1:
            raise ValueError("not permitted")

    assert dist.group.WORLD is not None
    with (
        patch.object(torch.UntypedStorage, "is_cuda", True),
        patch.object(offload, "call_runtime", call),
    ):
        copy = offload.share([torch.ones(3)], dist.group.WORLD)
    return copy is not None, calls


@pytest.mark.dist
def test_memory_that_one_rank_may_not_register_is_registered_nowhere(pool: RankPool) -> None:
    first, second = pool.run(_refused_by_cuda, world_size=2)
    assert first == (False, ["cudaHostRegister", "cudaHostUnregister"])
    assert second == (False, ["cudaHostRegister"])


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, (1 << 20) + 1, 3 << 20, (1 << 24) - 1, 4096 * 11008 * 4])
def test_pinned_memory_is_split_into_power_of_two_blocks(nbytes: int) -> None:
    assert host_sizes(nbytes, pinned=False) == [nbytes]
    sizes = host_sizes(nbytes, pinned=True)
    assert sum(sizes) == nbytes
    assert sum(1 << (size - 1).bit_length() for size in sizes if size) - nbytes < 1 << 20


def test_a_storage_is_restored_from_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "host_sizes", lambda nbytes, pinned: [16, 16, nbytes - 32])
    tensor = torch.arange(30.0)
    copy = offload.release([tensor[3:5], tensor])
    assert copy.nbytes == 120
    assert tensor.untyped_storage().nbytes() == 0
    copy.restore()
    assert tensor.tolist() == list(range(30))
