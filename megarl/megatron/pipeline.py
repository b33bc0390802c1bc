"""Micro-batches through the stages of a role: Megatron's schedules behind one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from torch.nn import Module

from megarl.data.packing import Chunks, PackedBatch, PackShape, TokenChunk, pack, pack_shape
from megarl.megatron.attention import PackParams
from megarl.megatron.loss_scale import LossOutput, as_megatron_loss
from megarl.megatron.model import RoleModel
from megarl.types import PackRow, RankSchedule


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A pack as one stage needs it.

    Args:
        rows: its samples.
        shape: positions and sequence bounds, which every stage needs.
        batch: tokens and labels; None on the stages between the first and the last, which fetch nothing.
    """

    rows: tuple[PackRow, ...]
    shape: PackShape
    batch: PackedBatch | None


Outcome = Callable[[MicroBatch, torch.Tensor], Any]
"""What the last stage makes of a micro-batch and its hidden states, [S, 1, H] or a sequence-parallel part of it."""

Work = tuple[MicroBatch, Outcome]
"""A micro-batch, and what is made of it."""


def micro_batches(model: RoleModel, schedule: RankSchedule, chunks: Chunks[TokenChunk]) -> list[MicroBatch]:
    """The packs of this rank; tokens are fetched on the first and the last stage only."""
    pp = model.groups.pp
    needs_tokens = is_pp_first_stage(pp) or is_pp_last_stage(pp)
    batches = []
    for rows in schedule.packs:
        batch = pack(rows, chunks, schedule.pack_tokens) if needs_tokens else None
        shape = batch.shape if batch is not None else pack_shape(rows, schedule.pack_tokens)
        batches.append(MicroBatch(rows=rows, shape=shape, batch=batch))
    return batches


def run_forward(model: RoleModel, batches: Sequence[MicroBatch], pack_tokens: int, outcome: Outcome) -> list[Any]:
    """Forward passes without gradients.

    Args:
        outcome: called on the last stage.

    Returns:
        What ``outcome`` returned for each micro-batch; empty on the other stages.
    """
    with torch.no_grad():
        work = [(batch, outcome) for batch in batches]
        return _run(model, model.chunks, work, pack_tokens, forward_only=True)


def run_forward_backward(
    model: RoleModel, wrapped: Sequence[Module], work: Sequence[Work], pack_tokens: int, loss_factor: float
) -> list[Any]:
    """Forward and backward passes; afterwards the gradients are reduced over DP.

    Args:
        wrapped: the chunks in Megatron's DDP wrapper.
        work: outcomes are called on the last stage; they return a loss, which is added to those of the other
            micro-batches and ranks, and what it tells.
        loss_factor: of ``loss_scale``.

    Returns:
        What was told of each micro-batch on the last stage; empty on the other stages.
    """

    def scaled(outcome: Outcome) -> Outcome:
        def of(batch: MicroBatch, hidden: torch.Tensor) -> LossOutput:
            loss, told = outcome(batch, hidden)
            return as_megatron_loss(loss, told, loss_factor)

        return of

    return _run(model, wrapped, [(batch, scaled(outcome)) for batch, outcome in work], pack_tokens, forward_only=False)


def _run(
    model: RoleModel,
    modules: Sequence[Module],
    work: Sequence[Work],
    pack_tokens: int,
    *,
    forward_only: bool,
) -> list[Any]:
    model.require_memory()
    config = model.config
    schedule = get_forward_backward_func(
        config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    )

    def forward_step(iterator: Any, module: Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch, outcome = next(iterator)
        return _forward(module, batch), partial(_finish, outcome, batch)

    return schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(work) for _ in modules],
        model=list(modules),
        num_microbatches=len(work),
        seq_length=pack_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        p2p_communicator=P2PCommunicator(model.groups.pp, config),
        pg_collection=model.groups,
    )


def _finish(outcome: Outcome, batch: MicroBatch, hidden: torch.Tensor, non_loss_data: bool = False) -> Any:
    """The schedules call this with ``non_loss_data=True`` in forward-only passes."""
    del non_loss_data
    return outcome(batch, hidden)


def _forward(module: Module, batch: MicroBatch) -> torch.Tensor:
    device = torch.cuda.current_device()
    tokens = None if batch.batch is None else torch.from_numpy(batch.batch.tokens).to(device).unsqueeze(0)
    return module(tokens, None, None, packed_seq_params=PackParams.of(batch.shape, device))
