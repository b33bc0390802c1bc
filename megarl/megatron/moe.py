"""Mixtures of experts: Megatron's layer as our roles build it.

Tokens go to their experts by all-to-all, as many as there are (no capacity, so none is dropped), and each expert is an
MLP of its own. No loss balances the routing. Every pass is a collective over the ranks that share the experts: a rank
without samples runs it on padding, as schedules have it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.types import Layout


class Router(TopKRouter):
    """Chooses experts by logits in the dtype of the hidden states and their softmax in float32, as Hugging Face does.

    Megatron makes the weight on the CPU and moves it in the first pass (moe/router.py, 0.16): too late for who keeps a
    reference.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.to(torch.cuda.current_device())


def expert_arguments(layout: Layout) -> dict[str, Any]:
    """Arguments of ``TransformerConfig`` for a mixture of experts, besides those of the model itself."""
    return {
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.tp,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    }


def expert_layer(experts: int) -> ModuleSpec:
    """What takes the place of a layer's MLP.

    Args:
        experts: in the layer, over all ranks.
    """
    layer = get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
    layer.submodules.router = Router
    return layer
