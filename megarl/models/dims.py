"""The sizes of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Engine = Literal["megatron", "vllm"]
Size = Literal[
    "one",
    "hidden",
    "attention",
    "values",
    "latent_queries",
    "latent",
    "latent_and_rotated",
    "expanded_latent",
    "ffn",
    "shared_ffn",
    "head",
    "positions",
    "experts",
]

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
class LatentDims:
    """The sizes of multi-head latent attention (MLA).

    Args:
        queries: elements of the latent of queries; None where queries have none.
        latent: elements of the latent of keys and values.
        rotated: elements of a head's query and key that are rotated; all heads share those of keys.
        plain: elements of a head's query and key that are not.
        value: elements of a head's value.
    """

    queries: int | None
    latent: int
    rotated: int
    plain: int
    value: int


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
        mla: sizes of its latent attention; None where attention is another.
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
    mla: LatentDims | None = None
    rows: int | None = None

    @property
    def rotary_dim(self) -> int:
        """Elements of a head of which a share is rotated."""
        return self.head_dim if self.mla is None else self.mla.rotated

    @property
    def value_dim(self) -> int:
        """Elements of a head's value."""
        return self.head_dim if self.mla is None else self.mla.value

    def size(self, name: Size) -> int:
        """Returns the extent of an axis of a canonical tensor."""
        latent: dict[Size, int] = {}
        if self.mla is not None:
            latent = {
                "latent_queries": self.mla.queries or 0,
                "latent": self.mla.latent,
                "latent_and_rotated": self.mla.latent + self.mla.rotated,
                "expanded_latent": self.heads * (self.mla.plain + self.mla.value),
            }
        sizes: dict[Size, int] = {
            **latent,
            "one": 1,
            "hidden": self.hidden,
            "attention": self.heads * self.head_dim,
            "values": self.heads * self.value_dim,
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
