"""Adam by Megatron's distributed optimizer: learning rates, each rank's shards, and the weights' EMA."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megarl.algos.optimization import ema, linear_anneal, tensorflow_eps
from megarl.config.schema import Optimizer
from megarl.megatron.model import RoleModel
from megarl.megatron.pipeline import probe_loss_factor


def learning_rate(settings: Optimizer, step: int, *, total: int, together: int = 1) -> float:
    """Returns the learning rate of an optimizer step.

    With W warm-up steps of N, step k < W has lr * (k + 1) / (W + 1); step W has lr, and later steps

        linear:  final_lr + (lr - final_lr) * (1 - p),      p = (k - W) / (N - W)
        cosine:  final_lr + (lr - final_lr) * (1 + cos(pi * p)) / 2
        anneal:  lr * (1 - s / S),                          in step s, from 0 on, of the S steps of the run

    No step has the rate 0: warm-up starts before the first step, and the decay ends after the last.

    Args:
        step: optimizer steps before this one; steps after the schedule's last have the last rate.
        total: optimizer steps of the run.
        together: optimizer steps of one step of the run, which with ``anneal`` have one rate.
    """
    warmup = min(math.ceil(settings.warmup * total), total - 1)
    if step < warmup:
        return settings.lr * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / (total - warmup))
    match settings.schedule:
        case "constant":
            return settings.lr
        case "anneal":
            last = min(step, total - 1)
            return linear_anneal(settings.lr, last // together, total // together)
        case "linear":
            height = 1.0 - progress
        case "cosine":
            height = (1.0 + math.cos(math.pi * progress)) / 2.0
    return settings.final_lr + (settings.lr - settings.final_lr) * height


@dataclass(frozen=True, kw_only=True)
class ShardedOptimizer:
    """The optimizer of a role's model on one rank; ``chunks`` are the model's in Megatron's DDP wrapper.

    It is sharded over DP, that of experts over the replicas with the same experts.
    """

    chunks: list[DistributedDataParallel]
    chained: ChainedOptimizer
    settings: Optimizer
    loss_factor: float

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Allocates the gradients in the block only; views of the buffers stay valid."""
        for buffer in self._gradient_buffers():
            buffer.untyped_storage().resize_(buffer.nbytes)
        try:
            yield
        finally:
            self.release_gradients()

    def release_gradients(self) -> None:
        for buffer in self._gradient_buffers():
            buffer.untyped_storage().resize_(0)

    def _gradient_buffers(self) -> list[Tensor]:
        chunks: list[Any] = self.chunks  # whose ``buffers`` hide the method of torch's modules
        buffers: list[Tensor] = []
        for chunk in chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffers.append(buffer.grad_data)
        return buffers

    def state(self) -> Iterator[Tensor]:
        """Yields the parameters that the optimizer steps, and their optimizer state."""
        for group in self.chained.param_groups:
            yield from group["params"]
        for sharded in self.chained.chained_optimizers:
            adam: Any = sharded.optimizer
            for values in adam.state.values():
                for value in values.values():
                    if isinstance(value, Tensor):
                        yield value

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.chained.zero_grad()

    def step(self, lr: float, steps_before: int) -> tuple[float, bool]:
        """Clips and takes one optimizer step, unless the gradient is not finite; collective.

        Returns the global gradient norm before clipping, and whether the step was taken. Skipped
        steps are not counted in ``steps_before``.
        """
        self.chained.prepare_grads()
        norm = float(self.chained.get_grad_norm())
        if not math.isfinite(norm):
            return norm, False
        settings = self.settings
        eps = settings.eps
        if settings.adam == "tensorflow":
            eps = tensorflow_eps(eps, settings.betas[1], steps_before + 1)
        parameters: list[Any] = []
        for group in self.chained.param_groups:
            parameters += group["params"]
            group["lr"] = lr
            group["eps"] = eps
        if settings.clip_grad is not None and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=settings.clip_grad, total_norm=norm)
        self.chained.step_with_ready_grads()
        return norm, True

    def publish(self) -> None:
        """Copies the optimizer's weights into the model on all replicas, as a step does; collective."""
        sharded: Any
        for sharded in self.chained.chained_optimizers:
            sharded._copy_main_params_to_model_params()
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)


def build_optimizer(model: RoleModel, settings: Optimizer) -> ShardedOptimizer:
    """Makes the optimizer of a model whose weights are set; collective over the role's ranks.

    Gradients are reduced, and optimizer state is kept, in float32. As in Megatron, biases and norms
    do not decay. There is no loss scale, which float16 would need.
    """
    assert model.config.params_dtype != torch.float16, "the preflight refuses float16"
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    loss_factor = probe_loss_factor(model.config, ddp, model.groups)
    chunks: list[Any] = [
        DistributedDataParallel(config=model.config, ddp_config=ddp, module=chunk, pg_collection=model.groups)
        for chunk in model.chunks
    ]
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=0.0,
        bf16=model.config.params_dtype == torch.bfloat16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=True,
    )
    chained = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False, pg_collection=model.groups)
    assert isinstance(chained, ChainedOptimizer)
    for group in chained.param_groups:
        # Megatron leaves the exemption of biases and norms to its learning-rate scheduler.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    if any(parameter.is_cuda for parameter in model.parameters().values()):
        fuse_adam(chained)
    optimizer = ShardedOptimizer(chunks=chunks, chained=chained, settings=settings, loss_factor=loss_factor)
    optimizer.release_gradients()
    return optimizer


def fuse_adam(chained: ChainedOptimizer) -> None:
    """Chooses torch's fused Adam, before the first step; its default takes 4 bytes a parameter of temporaries.

    Nothing changes where Megatron has taken the Adam of Transformer Engine or apex, which are fused.
    """
    for group in chained.param_groups:
        if "fused" in group:
            group["fused"] = True


@dataclass(frozen=True, kw_only=True)
class OptimizerShard:
    """A rank's part of a local parameter.

    Args:
        span: place in the flattened parameter.
        main: values that Adam steps, [len(span)]: a view, or a float32 copy of 16-bit ones.
        optimizer: torch's Adam, or a fused one.
    """

    name: str
    span: range
    main: Tensor
    optimizer: Any


def shards(model: RoleModel, optimizer: ShardedOptimizer) -> Iterator[OptimizerShard]:
    """Yields this rank's shards, possibly none."""
    named = {**model.parameters(), **model.adapters()}
    names = {parameter: name for name, parameter in named.items()}
    sharded: Any
    for sharded in optimizer.chained.chained_optimizers:
        adam = sharded.optimizer
        ranges_of: dict[torch.nn.Parameter, Any] = {}
        for by_dtype in sharded.gbuf_ranges:
            for buckets in by_dtype.values():
                for bucket in buckets:
                    ranges_of.update(bucket["param_map"])
        for parameter, ranges in ranges_of.items():
            group, order = sharded.model_param_group_index_map[parameter]
            local = ranges["param"]
            yield OptimizerShard(
                name=names[parameter],
                span=range(local.start, local.end),
                main=adam.param_groups[group]["params"][order],
                optimizer=adam,
            )


class WeightEMA:
    """An exponential moving average of the weights, sharded like the optimizer; it starts as a copy of the weights.

    It is in float32, because in 16 bits a step's change would be rounded away.
    """

    def __init__(self, model: RoleModel, optimizer: ShardedOptimizer, decay: float) -> None:
        self._model = model
        self._optimizer = optimizer
        self._decay = decay
        self.values = {shard.name: shard.main.detach().float().clone() for shard in shards(model, optimizer)}
        """The average of each ``OptimizerShard``, by name."""
        self.in_use = False
        """Whether weights and average are swapped."""

    @torch.no_grad()
    def update(self) -> None:
        for shard in shards(self._model, self._optimizer):
            average = self.values[shard.name]
            average.copy_(ema(average, shard.main, decay=self._decay))

    @torch.no_grad()
    def swap_weights(self, wanted: bool) -> None:
        """Swaps the average into the model (True), or the weights back, bit for bit; collective."""
        if wanted == self.in_use:
            return
        for shard in shards(self._model, self._optimizer):
            kept = shard.main.detach().clone()
            shard.main.copy_(self.values[shard.name])
            self.values[shard.name].copy_(kept)
        self._optimizer.publish()
        self.in_use = wanted
