"""What a family's page states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.weights.specs.elements import Element, Matrix, Names, VocabRows
from megarl.weights.specs.reading import Reader

Activation = Literal["silu", "gelu_tanh"]

HF_ACTIVATIONS: Mapping[Activation, tuple[str, ...]] = {
    "silu": ("silu",),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"),
}
"""What HF's ``hidden_act`` calls the activations."""


class UnsupportedModelError(ValueError):
    """The model's architecture or one of its features has no spec; the message lists every problem."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Where the tensors of a family are, in the order in which vLLM's parameters are loaded.

    Args:
        embedding: the input embedding.
        positions: the learned embedding of positions, where there is one.
        layer_prefix: the prefix of a layer's names, with ``{}`` for its index (Megatron counts within a model chunk).
        layer: the elements of one layer, without that prefix.
        final: what follows the last layer: the final norm.
        output: the output layer of a language model.
        score: the [1, hidden] head that replaces it in value and reward models.
        megatron: the fields of Megatron's ``TransformerConfig`` that are the family's own: norms, biases, the MLP.
    """

    embedding: VocabRows
    positions: Matrix | None = None
    layer_prefix: Names
    layer: tuple[Element, ...]
    final: tuple[Element, ...]
    output: VocabRows
    score: Matrix
    megatron: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's page.

    Args:
        model_type: HF's ``model_type``.
        lm_class, score_class: HF's classes with a language-model head and with a score head.
        describe: makes the table of a config, and notes what it does not support.
        fields: the config's names of fields where they are not the usual ones; see ``Reader``.
        defaults: what HF assumes of fields that a config lacks, by their usual names.
        activation: of the MLP.
        rotary: positions enter by rotary embeddings; otherwise they are learned.
        mlp_ratio: of the MLP's channels to the hidden ones where a config does not say.
        bare_prefix: what names begin with that checkpoints of the model without a head may leave away.
        ignored: patterns (as of fnmatch) of tensors that checkpoints may contain besides.
    """

    model_type: str
    lm_class: str
    score_class: str
    describe: Callable[[Reader], Table]
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    activation: Activation = "silu"
    rotary: bool = True
    mlp_ratio: int | None = None
    bare_prefix: str = ""
    ignored: tuple[str, ...] = ()
