"""What a family's page states, and the reading of HF configs that the pages share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.weights.regions import ITEM_BYTES
from megarl.weights.specs.elements import Dims, Element, Names, VocabRows

HFConfig = Mapping[str, Any]

LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The parameters of llama3 rope scaling that Megatron does not take (RotaryEmbedding of megatron-core 0.16.1)."""


class UnsupportedModelError(ValueError):
    """The model's architecture or one of its features has no spec; the message lists every problem."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Where the tensors of a family are, in the order in which vLLM's parameters are loaded.

    Args:
        embedding: the input embedding.
        layer_prefix: the prefix of a layer's names, with ``{}`` for its index (Megatron counts within a model chunk).
        layer: the elements of one layer, without that prefix.
        final: what follows the last layer: the final norm.
        output: the output layer of a language model.
        score: the name of the [1, hidden] head that replaces it in value and reward models.
        qkv_bias, linear_bias: whether the query, key and value projections, and whether all linear layers, have biases.
    """

    embedding: VocabRows
    layer_prefix: Names
    layer: tuple[Element, ...]
    final: tuple[Element, ...]
    output: VocabRows
    score: Names
    qkv_bias: bool
    linear_bias: bool


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding: its base, and the factor of Llama 3's scaling (None without)."""

    base: float
    llama3_factor: float | None


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's page.

    Args:
        model_type: HF's ``model_type``.
        prefix: of HF's class names, as in ``<prefix>ForCausalLM``.
        table: makes the table for a config.
        refusals: the family's own unsupported features that a config uses, each as "field: reason".
        default_rope_base: where the config names none (None: it has to).
    """

    model_type: str
    prefix: str
    table: Callable[[HFConfig], Table]
    refusals: Callable[[HFConfig], list[str]]
    default_rope_base: float | None = None

    @property
    def lm_class(self) -> str:
        """HF's class with a language-model head."""
        return f"{self.prefix}ForCausalLM"

    @property
    def score_class(self) -> str:
        """HF's class with a score head."""
        return f"{self.prefix}ForSequenceClassification"


@dataclass
class Reader:
    """Reads fields of an HF config and collects what is wrong with them.

    Args:
        config: the fields of a ``config.json``.
        problems: filled with one line per problem.
    """

    config: HFConfig
    problems: list[str] = field(default_factory=list)

    def positive(self, name: str, default: int | None = None) -> int:
        """A positive integer; a null counts as absent."""
        value = self.config.get(name)
        value = default if value is None else value
        if isinstance(value, int) and value > 0:
            return value
        self.problems.append(f"{name}: {value!r} is not a positive integer")
        return 1

    def dims(self) -> Dims:
        """The decoder's sizes."""
        hidden, heads = self.positive("hidden_size"), self.positive("num_attention_heads")
        dims = Dims(
            vocab=self.positive("vocab_size"),
            hidden=hidden,
            ffn=self.positive("intermediate_size"),
            layers=self.positive("num_hidden_layers"),
            heads=heads,
            kv_heads=self.positive("num_key_value_heads", heads),
            head_dim=self.positive("head_dim", hidden // heads),
        )
        if dims.heads % dims.kv_heads:
            self.problems.append(f"num_key_value_heads: {dims.kv_heads} does not divide the {dims.heads} heads")
        if dims.head_dim % 2:
            self.problems.append(f"head_dim: {dims.head_dim} is odd, which rotary embeddings cannot split")
        return dims

    def dtype(self) -> str:
        """The dtype of the stored weights; HF reads files that name none as float32."""
        name = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32").removeprefix("torch.")
        if name not in ITEM_BYTES:
            self.problems.append(f"dtype: {name} is not supported; supported are {', '.join(ITEM_BYTES)}")
        return name

    def rope(self, default_base: float | None) -> Rope:
        """The rotary embedding, from ``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``."""
        settings: Mapping[str, Any] = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        base = settings.get("rope_theta") or self.config.get("rope_theta") or default_base
        if base is None:
            self.problems.append("rope_theta: missing, and engines differ in what they assume; state it")
        kind = settings.get("rope_type") or settings.get("type") or "default"
        if kind == "llama3":
            return Rope(base=float(base or 1), llama3_factor=self._llama3_factor(settings))
        if kind != "default":
            self.problems.append(f"rope_type: {kind} is not supported; supported are default, llama3")
        return Rope(base=float(base or 1), llama3_factor=None)

    def _llama3_factor(self, settings: Mapping[str, Any]) -> float:
        for name, value in LLAMA3_FIXED.items():
            if settings.get(name) != value:
                self.problems.append(f"{name}: {settings.get(name)!r}; Megatron's llama3 scaling has {value} fixed")
        factor = settings.get("factor")
        if not isinstance(factor, int | float) or factor < 1:
            self.problems.append(f"factor: {factor!r} is not a number of at least 1")
            return 1.0
        return float(factor)

    def require(self, name: str, value: Any, reason: str) -> None:
        """Notes a problem unless the field is absent, null or ``value``."""
        actual = self.config.get(name)
        if actual is not None and actual != value:
            self.problems.append(f"{name}: {actual!r} is not supported ({reason})")

    def common_refusals(self) -> None:
        """Notes the features that no family supports."""
        self.require("hidden_act", "silu", "only silu")
        self.require("attention_dropout", 0, "trainer and engine must agree without randomness")
        self.require("is_causal", True, "only causal decoders")
        self.require("partial_rotary_factor", 1.0, "only full rotary embeddings")
        rope: Mapping[str, Any] = self.config.get("rope_parameters") or {}
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            self.problems.append("rope_parameters.partial_rotary_factor: only full rotary embeddings are supported")
        if self.config.get("quantization_config") is not None:
            self.problems.append("quantization_config: quantised weights are not supported")
        kinds = set(self.config.get("layer_types") or ()) - {"full_attention"}
        if kinds:
            self.problems.append(f"layer_types: {', '.join(sorted(kinds))} is not supported (only full_attention)")
