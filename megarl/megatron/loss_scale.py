"""The one place that knows what Megatron multiplies a loss with.

Our losses are weighted sums whose weights already contain the global denominator, so the gradient of an optimizer step
must be the plain sum over micro-batches and DP ranks. What Megatron does to a loss depends on its version, on
the number of values that the loss function returns, on ``calculate_per_token_loss`` and on the DDP settings. Instead of
repeating its rules, a model of two parameters is sent through the same schedule and the same gradient reductions at
start-up, and the factor is read off: of what all replicas share, and of what only those with the same experts share.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

LossOutput = tuple[torch.Tensor, torch.Tensor, object]


def as_megatron_loss(loss: torch.Tensor, told: object, factor: float) -> LossOutput:
    """What a loss function hands to Megatron's schedules.

    Args:
        loss: scalar, a weighted sum over the tokens of a micro-batch.
        told: what the schedule collects.
        factor: from ``probe_loss_factor``.

    Returns:
        The loss divided by the factor, zero tokens (a count would make Megatron divide by it), and what is told.
    """
    return loss / factor, torch.zeros((), dtype=torch.int, device=loss.device), told


class _Probe(MegatronModule):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder  # the schedules ask for it
        device = torch.cuda.current_device()
        self.shared = torch.nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))
        self.expert = torch.nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))
        self.expert.allreduce = False  # as Megatron marks the weights of experts under expert parallelism

    def set_input_tensor(self, input_tensor: list[torch.Tensor | None]) -> None:
        assert input_tensor == [None]

    def forward(self) -> torch.Tensor:
        return self.shared + self.expert


def probe_loss_factor(
    config: TransformerConfig, ddp_config: DistributedDataParallelConfig, groups: ProcessGroupCollection
) -> float:
    """The factor between a loss of 1.0 per micro-batch and the gradient that Megatron makes of it.

    Two micro-batches on each of N ranks that share a weight, each with the loss ``1.0 * weight``, should give 2 * N.
    Collective over the ranks of the role.

    Raises:
        RuntimeError: the factor is not a finite positive number, or another one for experts.
    """
    micro_batches = 2
    groups = copy.copy(groups)
    groups.embd = None  # the probe has no embeddings to keep equal
    probe: Any = _Probe(config)
    model = DistributedDataParallel(config=config, ddp_config=ddp_config, module=probe, pg_collection=groups)

    def loss(output: torch.Tensor) -> LossOutput:
        return as_megatron_loss(output, None, factor=1.0)

    def step(_batches: Iterator[None], module: torch.nn.Module) -> tuple[torch.Tensor, partial[LossOutput]]:
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
        raise RuntimeError(
            f"megatron-core scales a loss by {shared}, and by {expert} for experts; this version is not supported"
        )
    return shared


def _factor(weight: Any, replicas: torch.distributed.ProcessGroup, micro_batches: int) -> float:
    """A weight's gradient over what it should be."""
    # The distributed optimizer leaves the sum with the rank that owns the buffer, its own term with each other one.
    gradient: torch.Tensor = weight.main_grad.detach().clone()
    torch.distributed.all_reduce(gradient, torch.distributed.ReduceOp.MAX, group=replicas)
    return gradient.item() / (micro_batches * replicas.size())
