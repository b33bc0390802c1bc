"""Micro-batches through the stages of a role: Megatron's schedules behind one call.

Losses are weighted sums whose weights contain the global denominator, so the gradient of an
optimizer step must be the plain sum over micro-batches and DP ranks. How Megatron scales a loss
depends on its version, on the number of values that the loss function returns, on
``calculate_per_token_loss`` and on the DDP settings. Instead of repeating its rules, a probe of two
parameters, a shared one and an expert's, runs through the same schedule and gradient reductions at
start-up and measures the factor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining, get_forward_backward_func
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from megarl.data.packing import Chunks, PackedBatch, PackShape, TokenChunk, pack, pack_shape
from megarl.megatron.attention import PackParams, pack_arrays
from megarl.megatron.model import RoleModel
from megarl.megatron.staging import to_device
from megarl.types import PackRow, RankSchedule

LossOutput = tuple[Tensor, Tensor, object]


def as_megatron_loss(loss: Tensor, collected: object, factor: float) -> LossOutput:
    """Returns the result of a loss function for Megatron's schedules.

    That is the loss divided by ``probe_loss_factor``, zero tokens (Megatron would divide by a
    count), and the value that the schedule returns for the micro-batch.
    """
    no_tokens = torch.zeros((), dtype=torch.int, device=loss.device)
    return loss / factor, no_tokens, collected


class _Probe(MegatronModule):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder  # the schedules ask for it
        device = torch.cuda.current_device()
        self.shared = torch.nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))
        self.expert = torch.nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))
        self.expert.allreduce = False  # as Megatron marks the weights of experts under expert parallelism

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        assert input_tensor == [None]

    def forward(self) -> Tensor:
        return self.shared + self.expert


def probe_loss_factor(
    config: TransformerConfig, ddp_config: DistributedDataParallelConfig, groups: ProcessGroupCollection
) -> float:
    """Returns the factor by which Megatron multiplies a loss; collective over the role's ranks.

    Two micro-batches on each of N ranks that share a weight, each with the loss ``1.0 * weight``,
    should give 2 * N. Raises RuntimeError if it is not positive and finite, or other for experts.
    """
    micro_batches = 2
    groups = copy.copy(groups)
    groups.embd = None  # the probe has no embeddings to keep equal
    probe: Any = _Probe(config)
    model = DistributedDataParallel(config=config, ddp_config=ddp_config, module=probe, pg_collection=groups)

    def loss(output: Tensor) -> LossOutput:
        return as_megatron_loss(output, None, factor=1.0)

    def step(_batches: Iterator[None], module: torch.nn.Module) -> tuple[Tensor, partial[LossOutput]]:
        return module(), partial(loss)

    forward_backward_no_pipelining(
        forward_step_func=step,
        data_iterator=iter(()),
        model=[model],
        num_microbatches=micro_batches,
        seq_length=1,
        micro_batch_size=1,
        pg_collection=groups,
    )
    shared = _factor(probe.shared, groups.dp_cp, micro_batches)
    expert = _factor(probe.expert, groups.expt_dp, micro_batches)
    if not 0.0 < shared < float("inf") or shared != expert:
        scales = f"megatron-core scales a loss by {shared}, and by {expert} for experts"
        raise RuntimeError(f"{scales}; this version is not supported")
    return shared


def _factor(weight: Any, replicas: torch.distributed.ProcessGroup, micro_batches: int) -> float:
    """Returns a weight's gradient over the right one."""
    # The distributed optimizer leaves the sum on the buffer's owner, and terms on other ranks.
    gradient: Tensor = weight.main_grad.detach().clone()
    torch.distributed.all_reduce(gradient, torch.distributed.ReduceOp.MAX, group=replicas)
    return gradient.item() / (micro_batches * replicas.size())


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A pack on one stage; ``batch`` is None between the first and the last one, unless routes are replayed."""

    rows: tuple[PackRow, ...]
    shape: PackShape
    batch: PackedBatch | None

    @property
    def tokens(self) -> PackedBatch:
        assert self.batch is not None, "a stage in the middle has no tokens"
        return self.batch

    @cached_property
    def on_device(self) -> dict[str, Tensor]:
        """The arrays of the pack on this rank's device: those of ``pack_arrays`` and of ``PackedBatch``."""
        arrays = dict(pack_arrays(self.shape))
        if self.batch is not None:
            for name in ("tokens", "source_positions", "labels", "last_positions", "kept", "routes"):
                array = getattr(self.batch, name)
                if array is not None:
                    arrays[name] = array
        return to_device(arrays, torch.cuda.current_device())


LastStage = Callable[[MicroBatch, Tensor], Any]
"""The last stage's computation on a micro-batch and its hidden states, [S, 1, H], or a part of S."""

Work = tuple[MicroBatch, LastStage]


def micro_batches(model: RoleModel, schedule: RankSchedule, chunks: Chunks[TokenChunk]) -> list[MicroBatch]:
    """The packs of this rank; stages fetch tokens that are the first or the last, or replay routes."""
    pp = model.groups.pp
    has_routes = model.routed is not None and len(model.routed.layers) > 0
    needs_tokens = is_pp_first_stage(pp) or is_pp_last_stage(pp) or has_routes
    batches: list[MicroBatch] = []
    for rows in schedule.packs:
        batch = pack(rows, chunks, schedule.pack_tokens, model.routed) if needs_tokens else None
        shape = pack_shape(rows, schedule.pack_tokens)
        batches.append(MicroBatch(rows=rows, shape=shape, batch=batch))
    return batches


def run_forward(model: RoleModel, batches: Sequence[MicroBatch], pack_tokens: int, last_stage: LastStage) -> list[Any]:
    """Runs forward passes without gradients; see ``run_schedule``."""
    work = [(batch, last_stage) for batch in batches]
    with torch.no_grad():
        return run_schedule(model, model.chunks, work, pack_tokens)


def run_schedule(
    model: RoleModel,
    modules: Sequence[Module],
    work: Sequence[Work],
    pack_tokens: int,
    loss_factor: float | None = None,
) -> list[Any]:
    """Runs micro-batches through Megatron's pipeline schedule; afterwards gradients are reduced over DP.

    Returns the results of the last stage, losses detached; nothing on the other stages. In
    training, the functions return a loss and metrics; losses are summed over
    micro-batches and ranks.

    Args:
        modules: the model's chunks, in Megatron's DDP wrapper where there is a backward pass.
        loss_factor: result of ``probe_loss_factor``; None runs forward passes only.
    """
    model.require_memory()
    config = model.config
    pp = config.pipeline_model_parallel_size
    vpp = config.virtual_pipeline_model_parallel_size
    schedule = get_forward_backward_func(pp, vpp)

    def forward_step(iterator: Any, module: Module) -> tuple[Tensor, Callable[..., Any]]:
        batch, last_stage = next(iterator)

        def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
            result = last_stage(batch, hidden)
            if loss_factor is None:
                return result  # Megatron passes non_loss_data=True
            loss, metrics = result
            # Its gradient may be finite where the loss is not; with NaN, all ranks skip the step.
            kept = loss * torch.where(loss.isfinite(), torch.ones_like(loss), float("nan"))
            return as_megatron_loss(kept, (loss.detach(), metrics), loss_factor)

        return _forward(module, batch), finish

    return schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(work) for _ in modules],
        model=list(modules),
        num_microbatches=len(work),
        seq_length=pack_tokens,
        micro_batch_size=1,
        forward_only=loss_factor is None,
        collect_non_loss_data=loss_factor is None,
        p2p_communicator=P2PCommunicator(model.groups.pp, config),
        pg_collection=model.groups,
    )


def _forward(module: Module, batch: MicroBatch) -> Tensor:
    tokens = batch.on_device.get("tokens")
    if tokens is not None:
        tokens = tokens.unsqueeze(0)
    pack = PackParams.of(batch.shape, batch.on_device)
    pack.routes = batch.on_device.get("routes")
    return module(tokens, None, None, packed_seq_params=pack, output_processor=_hidden_states)


def _hidden_states(*, hidden_states: Tensor, **_unused: Any) -> Tensor:
    """Takes the place of the output layer on the last stage."""
    return hidden_states
