"""Routing of experts: the router, and tokens that go to the experts that an engine has chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.megatron.attention import PackParams

Chosen = tuple[Tensor, Tensor]
"""Scores and numbers of experts, each [tokens of this rank, experts of a token]."""


class RouteReplay:
    """The choice of a router's experts: recorded ones where there are some, else the router's own.

    Gradients flow through the scores of the experts that are used, as ever. Megatron's router calls
    ``get_replay_topk`` (0.19).

    Attributes:
        recorded: [S, experts of a token] of the pack, the dtype's largest number where nothing is
            recorded; None without records.
        compared, different: numbers of tokens with records, and of those of them for which the
            router would have chosen otherwise, in training since ``take_counts``.
    """

    def __init__(self, config: TransformerConfig, rank: int) -> None:
        self._split = config.sequence_parallel  # each TP rank has a part of the tokens
        self._rank = rank
        self.recorded: Tensor | None = None
        device = torch.cuda.current_device()
        self.compared = torch.zeros((), device=device)
        self.different = torch.zeros((), device=device)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., Chosen],
    ) -> Chosen:
        """Returns the chosen experts; ``scores`` are of [tokens of this rank, experts]."""
        groups = {"num_groups": num_groups, "group_topk": group_topk}
        values, own = default_compute_topk(scores, topk, **groups)
        if self.recorded is None:
            return values, own
        tokens = len(scores)
        recorded = self.recorded
        if self._split:
            recorded = recorded[self._rank * tokens : (self._rank + 1) * tokens]
        none = torch.iinfo(recorded.dtype).max
        recorded = recorded.long()
        is_recorded = recorded[:, :1] != none
        chosen = torch.where(is_recorded, recorded, own)
        if torch.is_grad_enabled():  # in training once, also where layers are recomputed
            is_different = (chosen.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1)
            self.compared += is_recorded.sum()
            self.different += is_different.sum()
        return scores.gather(1, chosen), chosen


class Router(TopKRouter):
    """Chooses experts by their softmax or sigmoid in float32, as Hugging Face.

    Logits are in the hidden states' dtype, or as ``moe_router_dtype`` says. ``expert_bias``, [experts]
    in float32, has no gradient.

    Megatron makes the weight on the CPU and moves it in the first pass
    (moe/router.py, 0.19), which breaks references.
    """

    def __init__(self, config: TransformerConfig, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        self.to(torch.cuda.current_device())
        self.router_replay = RouteReplay(config, self.tp_group.rank())
        if self.enable_expert_bias:
            # A parameter goes wherever weights go. Megatron would change it by the experts' loads.
            bias: Any = self._buffers.pop("expert_bias")
            self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)
            self.frozen_expert_bias = True


class MixtureLayer(TransformerLayer):
    """A layer with experts, whose router gets the pack's records before each pass, also when recomputed.

    Attributes:
        index: among the layers with experts of this rank.
    """

    index = 0

    def forward(self, *arguments: Any, packed_seq_params: PackParams, **options: Any) -> Any:
        """As Megatron's."""
        routes = packed_seq_params.routes
        mlp: Any = self.mlp
        mlp.router.router_replay.recorded = None if routes is None else routes[:, self.index]
        return super().forward(*arguments, packed_seq_params=packed_seq_params, **options)


def take_counts(layers: Iterable[Any], ranks: dist.ProcessGroup) -> dict[str, float]:
    """Returns the share of tokens that routers would have sent elsewhere, on all ranks; counts anew.

    Empty where nothing was recorded.
    """
    counts = torch.zeros(2, device=torch.cuda.current_device())
    for layer in layers:
        if isinstance(layer, MixtureLayer):
            mlp: Any = layer.mlp
            replay: RouteReplay = mlp.router.router_replay
            counts += torch.stack([replay.different, replay.compared])
            replay.different.zero_()
            replay.compared.zero_()
    dist.all_reduce(counts, group=ranks)
    different, compared = counts.tolist()
    return {"rerouted": different / compared} if compared else {}
