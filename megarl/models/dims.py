"""The sizes of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Engine = Literal["megatron", "vllm"]
Size = Literal["one", "hidden", "attention", "ffn", "shared_ffn", "head", "positions", "experts"]

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this, Megatron to a multiple of this times TP."""

DELTA_CHUNK: Final = 64
"""The most positions of a gated delta net whose updates of the state are solved together."""


@dataclass(frozen=True, kw_only=True)
class DeltaDims:
    """The sizes of gated delta nets.

    Args:
        key_heads, value_heads: numbers of heads; several value heads share a key head.
        key_dim, value_dim: elements of a head.
        width: positions under the convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The sizes of a decoder.

    Args:
        vocab: number of token ids.
        hidden: elements of a position between layers.
        ffn: channels of an MLP without experts.
        layers: number of layers, of all kinds.
        heads: attention heads, each with queries.
        kv_heads: attention heads with keys and values; several heads share one.
        head_dim: elements of an attention head.
        delta: sizes of its gated delta nets; None without any.
        positions: maximum sequence length.
        experts: number in a layer that has some; 0 in a dense model.
        expert_ffn: channels of an expert.
        shared_ffn: channels of the expert that has all tokens; 0 without one.
        rows: ids for which Megatron's embedding has rows; None: all of the vocabulary.
    """

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    delta: DeltaDims | None = None
    rows: int | None = None

    def size(self, name: Size) -> int:
        """Returns the extent of an axis of a canonical tensor."""
        sizes: dict[Size, int] = {
            "one": 1,
            "hidden": self.hidden,
            "attention": self.heads * self.head_dim,
            "ffn": self.ffn,
            "shared_ffn": self.shared_ffn,
            "head": self.head_dim,
            "positions": self.positions,
            "experts": self.experts,
        }
        return sizes[name]

    def padded_vocab(self, engine: Engine, tp: int) -> int:
        """Returns the rows of an engine's embedding over all TP ranks."""
        multiple = VOCAB_MULTIPLE
        rows = self.vocab
        if engine == "megatron":
            multiple *= tp
            rows = self.rows or rows
        return -(-rows // multiple) * multiple
