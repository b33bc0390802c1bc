"""Adam through Megatron's distributed optimizer, and the DDP wrapper that reduces its gradients."""

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

from megarl.algos.optimisation import tensorflow_eps
from megarl.config.schema import Optimizer
from megarl.megatron.learning_rate import Course
from megarl.megatron.loss_scale import probe_loss_factor
from megarl.megatron.model import RoleModel


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What trains a role's model on one rank.

    Args:
        chunks: the model's chunks in Megatron's DDP wrapper.
        optimizer: over all chunks, sharded over DP, and over the replicas with the same experts where there are such.
        settings: of the optimizer.
        course: of the learning rate.
        loss_factor: what Megatron multiplies a loss with, measured.
    """

    chunks: list[DistributedDataParallel]
    optimizer: ChainedOptimizer
    settings: Optimizer
    course: Course
    loss_factor: float

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Gives the gradients memory, for the time of some steps: while another role works, it is free.

        Parameters and optimizer hold views of the buffers, which are good again when the storages are.
        """
        for buffer in self._gradient_buffers():
            buffer.untyped_storage().resize_(buffer.nbytes)
        try:
            yield
        finally:
            self.release_gradients()

    def release_gradients(self) -> None:
        """Takes the memory of the gradients, and their contents."""
        for buffer in self._gradient_buffers():
            buffer.untyped_storage().resize_(0)

    def _gradient_buffers(self) -> list[torch.Tensor]:
        chunks: list[Any] = self.chunks  # their buffers are hidden behind the method of that name of a module
        return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def state(self) -> Iterator[torch.Tensor]:
        """What the optimizer keeps from step to step: the parameters that it steps, and what it knows of each."""
        for group in self.optimizer.param_groups:
            yield from group["params"]
        for megatron in self.optimizer.chained_optimizers:
            own: Any = megatron.optimizer
            for values in own.state.values():
                yield from (value for value in values.values() if isinstance(value, torch.Tensor))

    def zero_grad(self) -> None:
        """Clears the gradients of the last step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, lr: float, steps_before: int) -> tuple[float, bool]:
        """Clips and takes one optimizer step, unless the gradient is not finite; collective over the role's ranks.

        Args:
            lr: learning rate of this step.
            steps_before: steps that were taken before this one, skipped ones left out.

        Returns:
            The global gradient norm before clipping, and whether the step was taken: the same on all ranks.
        """
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm, False
        parameters: Any = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if self.settings.clip_grad is not None and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=self.settings.clip_grad, total_norm=norm)
        eps = self.settings.eps
        if self.settings.adam == "tensorflow":
            eps = tensorflow_eps(eps, self.settings.betas[1], steps_before + 1)
        for group in self.optimizer.param_groups:
            group["lr"], group["eps"] = lr, eps
        self.optimizer.step_with_ready_grads()
        return norm, True

    def publish(self) -> None:
        """Brings the weights that the optimizer steps into the model on all replicas, as a step does; collective."""
        for megatron in self.optimizer.chained_optimizers:
            own: Any = megatron
            own._copy_main_params_to_model_params()
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)


def build_trainer(model: RoleModel, settings: Optimizer, course: Course) -> Trainer:
    """Wraps a model whose weights are already set; collective over the role's ranks.

    Gradients are reduced, and the optimizer's state is kept, in float32. As in Megatron, biases and norms do not decay.

    Raises:
        ValueError: the model is in float16, whose range needs a loss scale.
    """
    if model.config.params_dtype == torch.float16:
        raise ValueError("training in float16 is not supported: its gradients vanish; use bfloat16 or float32")
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
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False, pg_collection=model.groups)
    assert isinstance(optimizer, ChainedOptimizer)
    for group in optimizer.param_groups:
        # Megatron leaves the exemption of biases and norms to its learning-rate scheduler.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    trainer = Trainer(chunks=chunks, optimizer=optimizer, settings=settings, course=course, loss_factor=loss_factor)
    trainer.release_gradients()
    return trainer
