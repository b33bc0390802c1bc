"""The memory of a role on a rank, bytes.

Parameters and optimizer state are exact. Activations are those that the backward pass of Megatron's local layers keeps
(megarl/megatron/model.py), for packs as long as they may become, whose tokens are all of responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megarl.models import ModelSpec
from megarl.role_specs import RoleSpec
from megarl.types import HEADS, Layout, RankCoords
from megarl.weights.shard_map import ITEM_BYTES

_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once (``megatron.logprobs``)."""


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """A role on a rank; the longest packs are ``pack`` in inference and ``update_pack`` in updates."""

    spec: RoleSpec
    model: ModelSpec
    layout: Layout
    stage: int
    device: str
    pack: int
    update_pack: int
    micro_batches: int

    @cached_property
    def _numels(self) -> dict[str, int]:
        coords = RankCoords(tp=0, dp=0, pp=self.stage)
        params = self.model.megatron_map(self.layout, self.layout.rank(coords), HEADS[self.spec.name]).params
        return {name: math.prod(info.shape) for name, info in params.items()}

    @property
    def parameters(self) -> int:
        return sum(self._numels.values()) * self._item

    @property
    def gradients(self) -> int:
        return 4 * sum(self._numels.values())

    @property
    def optimizer(self) -> int:
        training = self.spec.training
        if training is None:
            return 0
        columns = 2 + (self._item < 4) + (training.ema_decay is not None)  # moments, float32 weights, average
        return 4 * columns * sum(self._shards.values())

    @property
    def stepping(self) -> int:
        """Adam's intermediate results: one of all weights on CUDA, two of each in turn on a CPU."""
        if self.device == "cuda":
            return 4 * sum(self._shards.values())
        return 8 * max(self._shards.values())

    @property
    def _shards(self) -> dict[str, int]:
        """Elements of each parameter that this rank's optimizer has."""
        shards: dict[str, int] = {}
        for name, elements in self._numels.items():
            ranks = self.layout.dp
            if "mlp.experts." in name:
                ranks //= self.layout.ep
            shards[name] = -(-elements // ranks)
        return shards

    @property
    def state(self) -> int:
        """What the role has on its device while it is not offloaded."""
        return self.parameters + self.optimizer

    @property
    def snapshot(self) -> int:
        """What this rank writes of a checkpoint: a part of what its replicas share, and its state."""
        return self.parameters // self.layout.dp + self.optimizer

    @property
    def written(self) -> int:
        """What writing takes: a copy of one tensor, and what torch.save makes of it."""
        return 2 * max(self._shards.values()) * 4

    def inference(self) -> tuple[int, int]:
        """Returns the activations of a forward pass, one layer at a time, and the logits."""
        dims = self.model.dims
        tp = self.layout.tp
        attention = (4 * dims.heads + 6 * dims.kv_heads) * dims.head_dim / tp
        mlp = 5 * dims.ffn * self._experts / tp
        elements = 3 * dims.hidden + max(attention, mlp)
        return int(self.pack * elements * self._item), self._logits(self.pack)

    def update(self) -> tuple[int, int]:
        """Returns the activations for a backward pass, and the logits with the head's gradients."""
        layers = [len(self.model.layers(self.layout, self.stage, chunk)) for chunk in range(self.layout.vpp)]
        width = self.model.dims.hidden
        hidden = width * self._item * self._split
        layer = self._layer()
        kept = hidden if self.spec.recompute == "full" else layer
        ends = hidden
        if self._last:
            ends = 3 * hidden + self._norm(width) * self._split
        logits = self._logits(self.update_pack)
        if self._last and HEADS[self.spec.name] == "lm":
            logits += self._vocab_rows * width * (4 + self._item) + self.update_pack * width * self._item
        activations = self.update_pack * (kept * max(layers) * self._in_flight() + ends)
        if self.spec.recompute == "full":  # a layer is computed again when the logits are gone
            activations += max(0.0, self.update_pack * layer - logits)
        return int(activations), logits

    def _in_flight(self) -> int:
        """Returns the micro-batches (of chunks) whose activations a stage holds at once."""
        pp = self.layout.pp
        vpp = self.layout.vpp
        if vpp == 1:
            return min(pp - self.stage, self.micro_batches)
        return min(2 * (pp - self.stage - 1) + (vpp - 1) * pp + 1, self.micro_batches * vpp)

    def _layer(self) -> float:
        """Returns the bytes of a token that a layer keeps, or recomputes, for its backward pass."""
        dims = self.model.dims
        tp = self.layout.tp
        item = self._item
        norms = 2 * self._norm(dims.hidden) * self._split
        rope = 0
        if self.model.rope is not None:
            rope = 4 * dims.head_dim * item
        qkv = (dims.heads + 2 * dims.kv_heads) * dims.head_dim * item / tp
        one = dims.heads * dims.head_dim * item / tp  # queries, or the attention's output
        kv = 2 * dims.kv_heads * dims.head_dim * item / tp
        if self.spec.recompute == "selective":
            attention = one + kv / 2 + qkv + one  # values are a part of what is projected
        elif self.device == "cuda" and item < 4:
            attention = one + kv / 2 + qkv + one + 4 * dims.heads / tp
        else:
            attention = 3 * one + kv + 4 * dims.heads / tp  # in rectangles
        if self.model.table.megatron.get("qk_layernorm"):
            heads = (dims.heads + dims.kv_heads) / tp
            inputs = 4 * (one + kv / 2) / item
            if item == 4:
                inputs = qkv + one
            attention += inputs + one + kv / 2 + 4 * heads
        return norms + rope + attention + self._mlp()

    def _norm(self, size: int) -> float:
        """Returns the bytes of a norm and of its output: RMSNorm keeps its input and the quotient, LayerNorm one.

        So do Transformer Engine's norms (pytorch/module/layernorm_linear.py, 2.8 to 2.20), which was never measured.
        """
        if self.model.table.megatron["normalization"] == "LayerNorm" or self.spec.layers == "transformer_engine":
            return 2 * size * self._item + 8
        return size * (4 + 2 * self._item) + 4

    def _mlp(self) -> float:
        dims = self.model.dims
        tp = self.layout.tp
        ffn = dims.ffn * self._item / tp
        if dims.experts:
            return self._experts * (6 * ffn + dims.hidden * self._item) + 16 * dims.experts
        if self.model.table.megatron["gated_linear_unit"]:
            return 5 * ffn
        return 2 * ffn

    def _logits(self, tokens: int) -> int:
        if not self._last or HEADS[self.spec.name] != "lm":
            return 0
        return 8 * min(_CHUNK_TOKENS, tokens) * self._vocab_rows

    @property
    def _item(self) -> int:
        return ITEM_BYTES[self.model.dtype]

    @property
    def _split(self) -> float:
        """The part of the tokens that this rank has between the tensor-parallel regions."""
        if self.layout.sequence_parallel:
            return 1 / self.layout.tp
        return 1.0

    @property
    def _experts(self) -> int:
        """Experts of a token, if tokens are spread evenly."""
        return self.model.table.megatron.get("moe_router_topk", 1)

    @property
    def _last(self) -> bool:
        return self.stage == self.layout.pp - 1

    @property
    def _vocab_rows(self) -> int:
        return self.model.dims.padded_vocab("megatron", self.layout.tp) // self.layout.tp
