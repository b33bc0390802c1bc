"""What Megatron has to know of a mixture of experts."""

from __future__ import annotations

from typing import Any

from megarl.weights.specs.reading import Reader


def routing(read: Reader, *, renormalised: bool) -> dict[str, Any]:
    """The fields of ``TransformerConfig`` for a router that weights its choice of experts by softmax.

    Args:
        renormalised: the chosen experts' weights sum to 1, which is softmax after the choice.
    """
    chosen, experts = read.positive("num_experts_per_tok"), read.positive("num_experts")
    if chosen > experts:
        read.problems.append(f"num_experts_per_tok: {chosen} exceeds the {experts} experts")
    if chosen == 1 and renormalised:
        read.problems.append("num_experts_per_tok: 1 is not supported where weights sum to 1 (Megatron refuses it)")
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": read.positive("intermediate_size"),
        "moe_router_topk": chosen,
        "moe_router_pre_softmax": not renormalised,
    }
