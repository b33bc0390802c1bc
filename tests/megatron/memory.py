"""A role's memory, measured in its own process, and the planned memory."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megarl.cluster.process_usage import take_peak_memory
from megarl.config.schema import LoRA, Optimizer
from megarl.config.schema.loss_specs import TextSpec
from megarl.data.packing import pack_shape
from megarl.data.schedule import step_schedule
from megarl.megatron.attention import PackParams, pack_arrays
from megarl.megatron.model import FusedRMSNorm
from megarl.megatron.model_engine import ModelEngine
from megarl.megatron.parallel import GroupCache
from megarl.megatron.staging import to_device
from megarl.megatron.state import plan_save
from megarl.megatron.supervised_losses import text_loss
from megarl.models import model_spec
from megarl.preflight.role_memory import RoleMemory, role_memory
from megarl.role_specs import RoleSpec, TrainingSpec, adapters_of
from megarl.types import Layout, PackRow
from tests.megatron.samples import random_chunks

ROW_TOKENS, MIB = 64, 1 << 20
_M_MMAP_THRESHOLD = -3


def assert_planned(found: Mapping[str, int], planned: Mapping[str, int]) -> None:
    """Compares the bytes of phases, within 10%; with ``pytest -s``, the figures are seen."""
    for phase, nbytes in planned.items():
        print(f"{phase:<12} planned {nbytes / MIB:7.1f} MiB   taken {found[phase] / MIB:7.1f} MiB")
    assert {phase: found[phase] for phase in planned} == pytest.approx(planned, rel=0.1)


def plan_of(
    config: dict[str, Any],
    tokens: int,
    layout: Layout,
    recompute: Any = "none",
    device: str = "cpu",
    fused: bool = False,
    lora: LoRA | None = None,
) -> RoleMemory:
    """The plan of an actor in training."""
    optimizer = Optimizer(lr=1e-3)
    training = TrainingSpec(
        optimizer=optimizer, total_steps=2, steps_together=1, ema_decay=None, loss=TextSpec(stage="sft"), lora=lora
    )
    spec = RoleSpec(
        name="actor",
        layout=layout,
        recompute=recompute,
        layers="auto",
        fused=fused,
        offload=False,
        checkpoint=None,
        new_head=None,
        vocab_size=None,
        longest=100,
        training=training,
        reference_weight=None,
    )
    model = model_spec(config)
    return role_memory(spec, model, 0, device, pack=tokens, update_pack=tokens, micro_batches=1)


def make_actor(
    config: dict[str, Any],
    layout: Layout,
    rank: int,
    recompute: Any = "none",
    *,
    fused: bool = False,
    lora: LoRA | None = None,
) -> Any:
    spec = model_spec(config)
    make: dict[str, Any] = {"trainable": True, "recompute": recompute, "fused": fused}
    make["adapters"] = None if lora is None else adapters_of(lora)
    make["layers"] = "local"  # whose activations the plan counts
    actor = ModelEngine("actor", spec, layout, rank, GroupCache(), **make)
    dtype = getattr(torch, spec.dtype)
    actor.load({name: 0.02 * torch.randn(info.shape, dtype=dtype) for name, info in actor.shard_map.params.items()})
    return actor


class _KernelNorm(torch.autograd.Function):
    """Keeps what CUDA's kernel of ``F.rms_norm`` keeps; on a CPU torch computes it op by op."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x.float() * scale * weight).to(x.dtype)


def kept_by_layers(
    rank: int, config: dict[str, Any], layers: str, layout: Layout, recompute: Any, tokens: int, fused: bool, lora: Any
) -> list[tuple[int, int]]:
    """Bytes that the backward pass keeps of a pack and those of the plan, with two layers and with three."""
    with mock.patch.object(FusedRMSNorm, "forward", lambda norm, x: _KernelNorm.apply(x, norm.weight, norm.eps)):
        return _kept_by_layers(rank, config, layers, layout, recompute, tokens, fused, lora)


def _kept_by_layers(
    rank: int, config: dict[str, Any], layers: str, layout: Layout, recompute: Any, tokens: int, fused: bool, lora: Any
) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for count in (2, 3):
        sized = {**config, layers: count}
        if config.get("layer_types"):
            sized["layer_types"] = config["layer_types"][:count]
        actor = make_actor(sized, layout, rank, recompute, fused=fused, lora=lora)
        (chunk,) = actor.model.chunks
        own = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor, own: Any = own, kept: Any = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage
            return tensor

        rows = [PackRow(chunk=0, row=i, prompt_tokens=1, response_tokens=ROW_TOKENS - 1) for i in range(tokens // 64)]
        shape = pack_shape(rows, tokens)
        pack = PackParams.of(shape, to_device(pack_arrays(shape), torch.device("cpu")))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            chunk(torch.zeros(1, tokens, dtype=torch.int64), None, None, packed_seq_params=pack)
        found.append(
            (
                sum(storage.nbytes() for storage in kept.values()),
                plan_of(sized, tokens, layout, recompute, fused=fused, lora=lora).update[0],
            )
        )
    return found


def peaks(rank: int, config: dict[str, Any], tokens: int, recompute: Any, directory: Path) -> dict[str, int]:
    """The most bytes of an actor in training by phase, beyond what the process has after all of it with a small model.

    Args:
        directory: for its checkpoints, one written at once and one from a copy.
    """
    if not torch.cuda.is_initialized():
        return_freed_memory()
    small = {**config, "num_hidden_layers": 1, "vocab_size": 128}
    _peaks(rank, small, ROW_TOKENS, recompute, directory / "small")
    gc.collect()
    before = present()
    found = _peaks(rank, config, tokens, recompute, directory / "planned")
    return {phase: peak - before for phase, peak in found.items()}


def return_freed_memory(*, at_once: bool = True) -> None:
    """Makes this process return freed memory at once, or keep some for later as glibc does, up to a quarter more."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16 if at_once else 1 << 25)
    libc.malloc_trim(0)


def _peaks(rank: int, config: dict[str, Any], tokens: int, recompute: Any, directory: Path) -> dict[str, int]:
    directory.mkdir()
    actor = make_actor(config, Layout(), rank, recompute)
    length = ROW_TOKENS - 1
    chunks, infos = random_chunks(1, tokens // ROW_TOKENS, config["vocab_size"], 1, length, length)
    (schedule,) = step_schedule(infos, Layout(), tokens).ranks
    assert schedule.pack_tokens == tokens
    actor.start_training(Optimizer(lr=1e-3), total_steps=2)
    for _ in range(2):  # the first makes the optimizer's state
        take_peak_memory()
        actor.update([schedule], chunks, partial(text_loss, actor))
        update = take_peak_memory()
    take_peak_memory()
    actor.logprobs(schedule, chunks, 1.0)
    inference = take_peak_memory()
    plan_save(actor, directory / "at once")()
    checkpoint = take_peak_memory()
    group: Any = dist.new_group(backend="gloo")
    plan_save(actor, directory / "later", group)()
    return {"update": update, "inference": inference, "checkpoint": checkpoint, "copied": take_peak_memory()}


def present() -> int:
    """Bytes of this process: allocated by torch on a GPU, or resident."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])
