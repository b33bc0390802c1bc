"""The experts of a layer: one parameter for each matrix of all of them, and grouped products.

Megatron's own experts without Transformer Engine are modules that are called one after the other
(SequentialMLP, 0.19).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.staging import to_device


def quick_gelu(x: Tensor) -> Tensor:
    """Returns x sigmoid(1.702 x); Megatron compiles its function of this name."""
    return x * torch.sigmoid(1.702 * x)


class ExpertLinear(torch.nn.Module):
    """A matrix [outputs, inputs], and maybe a bias, for each expert of a rank.

    Args:
        axis: axis of the matrix that TP splits.
    """

    def __init__(self, experts: int, outputs: int, inputs: int, config: TransformerConfig, *, axis: int) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        values = torch.empty(experts, outputs, inputs, dtype=config.params_dtype, device=device)
        weight: Any = torch.nn.Parameter(values)
        set_tensor_model_parallel_attributes(weight, True, axis + 1, 1)
        # As in Megatron, where gradients are summed over the replicas of the same experts.
        weight.allreduce = config.expert_model_parallel_size == 1
        self.weight = weight
        self.bias: Any = None
        if config.add_bias_linear:
            self.bias = torch.nn.Parameter(torch.empty(experts, outputs, dtype=config.params_dtype, device=device))
            self.bias.allreduce = weight.allreduce
            if axis == 0:
                set_tensor_model_parallel_attributes(self.bias, True, 1, 1)

    def forward(self, tokens: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]; each expert has the rows from the last one's end to its own.

        Args:
            counts: [experts], on the host.
            ends: [experts] int32, on the device.
        """
        return grouped_product(tokens, self.weight, counts, ends)


def grouped_product(tokens: Tensor, matrices: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
    """Multiplies the tokens of each expert by its matrix, [experts, outputs, inputs]; see ``ExpertLinear.forward``.

    Grouped products need rows of a multiple of 16 bytes, and on a GPU bfloat16 and compute capability
    9.0 (torch 2.13). Other matrices are multiplied one by one.
    """
    is_aligned = all(size * matrices.element_size() % 16 == 0 for size in matrices.shape[1:])
    if is_aligned and _has_grouped_products(tokens):
        return _Contiguous.apply(F.grouped_mm(tokens, matrices.transpose(-2, -1), offs=ends))
    products: list[Tensor] = []
    for part, matrix in zip(tokens.split(counts.tolist()), matrices, strict=True):
        products.append(F.linear(part, matrix))
    return torch.cat(products)


def _has_grouped_products(tokens: Tensor) -> bool:
    """Whether a kernel multiplies all groups; below compute capability 9.0 torch loops, and the host waits (2.13)."""
    if tokens.device.type == "cpu":
        return True
    return tokens.dtype == torch.bfloat16 and torch.cuda.get_device_capability(tokens.device) >= (9, 0)


class _Contiguous(torch.autograd.Function):
    """The same; grouped products need gradients without gaps, and do not say so (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0]
        if gradient.numel() == 0:  # which may be without gaps in any strides
            return torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        return gradient.contiguous()


class GroupedExperts(torch.nn.Module):
    """The gated MLPs of this rank's experts.

    A ``MoELayer`` makes it, and sends it the tokens.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        self._tp = pg_collection.expt_tp
        assert config.moe_ffn_hidden_size is not None
        channels = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        hidden = config.hidden_size
        self.linear_fc1 = ExpertLinear(num_local_experts, 2 * channels, hidden, config, axis=0)
        self.linear_fc2 = ExpertLinear(num_local_experts, hidden, channels, config, axis=1)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Applies each expert to its tokens.

        Args:
            tokens: [T, hidden], those of one expert after those of another.
            tokens_per_expert: [experts]; Megatron's dispatcher has brought it to the host.
            weights: [T], those of the experts in the sums of their tokens.
        """
        counts = tokens_per_expert.cpu()
        ends = to_device({"ends": counts.cumsum(0).to(torch.int32).numpy()}, tokens.device)["ends"]
        both = self.linear_fc1(tokens, counts, ends)
        if self._config.activation_func_clamp_value is not None:
            return self._clamped(both, counts, ends, weights), None
        if self._config.bias_activation_fusion:
            activated = weighted_bias_swiglu_impl(both, None, weights.unsqueeze(-1))
        else:
            gate, up = both.chunk(2, dim=-1)
            activated = self._config.activation_func(gate) * up * weights.unsqueeze(-1)
            activated = activated.to(both.dtype)
        return self.linear_fc2(activated, counts, ends), None

    def _clamped(self, both: Tensor, counts: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
        """Returns the outputs of gpt-oss' experts: act(gate) (1 + up), both clamped, and biases.

        Args:
            both: [T, 2 channels], products with gates and ups in turn, without their biases.
            counts, ends: see ``ExpertLinear``.
            weights: [T], those of the experts in the sums of their tokens.

        Returns [T, hidden], of which the TP ranks have parts to add up.
        """
        config = self._config
        experts = torch.arange(len(counts)).repeat_interleave(counts)
        expert = to_device({"expert": experts.numpy()}, both.device)["expert"]  # of each token
        # Gradients of biases are sums over all tokens, which 16 bits would not add up.
        both = (both + self.linear_fc1.bias.float()[expert]).to(both.dtype)
        limit = config.activation_func_clamp_value
        assert limit is not None
        gate = both[:, ::2].clamp(max=limit)
        up = both[:, 1::2].clamp(min=-limit, max=limit)
        activated = config.activation_func(gate) * (up + config.glu_linear_offset)
        scale = weights.unsqueeze(-1)
        output = self.linear_fc2((activated * scale).to(both.dtype), counts, ends)
        # The TP ranks' outputs are added up; the first one's have the bias, whose gradient all get.
        bias = copy_to_tensor_model_parallel_region(self.linear_fc2.bias, self._tp).float()
        if self._tp.rank() > 0:
            bias = bias * 0
        return output + (bias[expert] * scale).to(output.dtype)


class SharedExpert(SharedExpertMLP):
    """Megatron's expert for all tokens, whose gate is where its matrices are."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        gate: bool,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config, submodules, gate, pg_collection, name)
        weight: Any = self.gate_weight
        if weight is not None:
            weight.data = weight.data.to(torch.cuda.current_device())
