"""HF configurations: what a model family states, and the fields that all families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

from megarl.models.dims import DeltaDims, Dims, LatentDims
from megarl.models.expert_params import Experts, StackedExperts
from megarl.models.param_stacks import Names
from megarl.models.param_types import DeltaNetParams, ParamType, Replicated, VocabRows
from megarl.weights.shard_map import ITEM_BYTES

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]

HF_ACTIVATIONS: Mapping[Activation, tuple[str, ...]] = {
    "silu": ("silu",),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"),
    "clamped_swiglu": ("silu",),
}
"""Values of HF's ``hidden_act``."""


OUTPUT = VocabRows(names=Names("lm_head", "output_layer"))
"""The output layer of a language model."""
SCORE = Replicated(names=Names("score", "output_layer"), shape=("one", "hidden"))
"""The head that replaces it in value and reward models."""


@dataclass(frozen=True)
class LayerSpec:
    """A kind of layer.

    Args:
        params: its parameters, without the prefix of a layer.
        window: last positions, its own included, that each one sees; None: all.
        post_norms: whether norms follow attention and MLP, before the residuals are added.
    """

    params: tuple[ParamType, ...]
    window: int | None = None
    post_norms: bool = False

    @property
    def is_mixture(self) -> bool:
        return any(isinstance(param, Experts | StackedExperts) for param in self.params)

    @property
    def is_delta_net(self) -> bool:
        return any(isinstance(param, DeltaNetParams) for param in self.params)


@dataclass(frozen=True, kw_only=True)
class ParamTable:
    """The parameters of a model, in the order in which vLLM loads them.

    Args:
        layer_prefix: prefix of a layer's names, with ``{}`` for its index (in
            Megatron, in a chunk).
        layers: the kind of each layer.
        final: parameters after the last layer.
        untrained: patterns of tensors as of the family's, that depend on the config.
        embedding_scale: factor of what the embedding returns, rounded to its dtype.
        megatron: fields of ``TransformerConfig`` that differ by family: norms, biases, the MLP.
    """

    embedding: VocabRows
    positions: Replicated | None = None
    layer_prefix: Names
    layers: tuple[LayerSpec, ...]
    final: tuple[ParamType, ...]
    untrained: tuple[str, ...] = ()
    embedding_scale: float | None = None
    megatron: Mapping[str, Any]

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The kinds of its layers, each once."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def has_stacked_experts(self) -> bool:
        """Whether experts are those of gpt-oss: with biases, in tensors of all of them."""
        return any(isinstance(param, StackedExperts) for kind in self.kinds for param in kind.params)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same parameters, which Megatron's checkpoints stack then."""
        return len({kind.params for kind in self.kinds}) == 1

    @cached_property
    def mixtures(self) -> tuple[int, ...]:
        """The layers with experts."""
        return tuple(layer for layer, kind in enumerate(self.layers) if kind.is_mixture)

    @property
    def delta_nets(self) -> int:
        """Number of layers that are gated delta nets.

        All others have attention.
        """
        return sum(layer.is_delta_net for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    Args:
        lm_class, score_class: HF's classes with a language-model head and with a score head.
        describe: function that returns the table of a config, and adds problems to the reader.
        fields: unusual config names of fields; the first one in a config counts.
        defaults: HF's values for fields that a config lacks, by their usual names.
        rotary: whether positions are rotary; otherwise they are learned.
        partial_rotary: whether a part of each head may be rotated.
        rope_types: HF's types of rope that the engines take; empty: all.
        has_local_rope: whether layers with windows have rotary embeddings of their own.
        unused_rope: fields of ``rope_parameters`` that do not matter for text.
        layer_types: HF's types of layers that it may have.
        mlp_ratio: default ratio of the MLP's channels to the hidden ones.
        bare_prefix: prefix of names, which checkpoints of the model without a head may omit.
        ignored: patterns (as of fnmatch) of tensors that checkpoints may contain as well.
        untrained: patterns of tensors of other parts of the model, such as a vision tower: these
            pass from a checkpoint into its exports.
        shared_expert: whether mixtures have an MLP for all tokens beside the routed experts, maybe with a gate.
        latent: whether attention is multi-head latent attention (MLA).
        has_text_config: whether the decoder's fields are in the config's ``text_config``.
        engine_class: class of the decoder alone, which engines have; None: ``lm_class``.
        engine_adapters: whether vLLM's class applies adapters.
    """

    model_type: str
    lm_class: str
    score_class: str
    describe: Callable[[HFConfigReader], ParamTable]
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    activation: Activation = "silu"
    rotary: bool = True
    partial_rotary: bool = False
    rope_types: tuple[str, ...] = ()
    has_local_rope: bool = False
    unused_rope: tuple[str, ...] = ()
    layer_types: tuple[str, ...] = ("full_attention",)
    mlp_ratio: int | None = None
    bare_prefix: str = ""
    ignored: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    shared_expert: Literal["gated", "plain"] | None = None
    latent: bool = False
    has_text_config: bool = False
    engine_class: str | None = None
    engine_adapters: bool = True


HFConfig = Mapping[str, Any]

_MAX_COUNTS = {"num_hidden_layers": 10_000, "num_experts": 10_000}
"""Largest values of fields that count parameters, whose list fits into memory; others fit in 32 bits."""
_MAX_EXPERTS = 100_000
"""Largest number of experts in all layers together."""
_MAX_NUMBER = 1e30
"""Largest number, far from the range of float32."""


def shown(value: object, write: Callable[[object], str] = repr) -> str:
    """Returns a value of a config as text of at most 80 characters."""
    text = write(value)
    return f"{text[:77]}..." if len(text) > 80 else text


@dataclass
class HFConfigReader:
    """Reads fields of an HF config, by their usual names, and collects problems, one line each."""

    config: HFConfig
    family: Family
    problems: list[str] = field(default_factory=list[str])

    def name(self, field: str) -> str:
        """Returns the config's name of a field."""
        names = self.family.fields.get(field, (field,))
        return next((name for name in names if name in self.config), names[0])

    def get(self, field: str) -> Any:
        """Returns a field's value, or HF's default."""
        return self.config.get(self.name(field), self.family.defaults.get(field))

    def problem(self, name: str, value: object, rule: str) -> None:
        self.problems.append(f"{name}: {shown(value)} {rule}")

    def refuse(self, field: str, rule: str) -> None:
        """Adds a problem of a field's value."""
        self.problem(field, self.get(field), rule)

    def positive(self, field: str, default: int | None = None) -> int:
        """Reads a positive integer; null counts as ``default``."""
        value = self.get(field)
        if value is None:
            value = default
        return self.as_count(self.name(field), value, _MAX_COUNTS.get(field, 2**31 - 1))

    def as_count(self, name: str, value: Any, largest: int = 2**31 - 1) -> int:
        """Returns a value that must be a positive integer."""
        rule = "is not a positive integer"
        if type(value) is int and value > 0:
            if value <= largest:
                return value
            rule = f"is above {largest}"
        self.problem(name, value, rule)
        return 1

    def number(self, field: str) -> float:
        """Reads a number above 0."""
        return self.as_number(self.name(field), self.get(field))

    def as_number(self, name: str, value: Any) -> float:
        """Returns a value that must be a number above 0."""
        if type(value) in (int, float) and 0 < value < _MAX_NUMBER:
            return float(value)
        self.problem(name, value, "is not a number above 0")
        return 1.0

    def flag(self, field: str) -> bool:
        """Reads true or false; null and an absent field count as false."""
        value = self.get(field)
        if value in (None, False, True):
            return bool(value)
        self.problems.append(f"{self.name(field)}: {shown(value)} is neither true nor false")
        return False

    def _latent_dims(self) -> LatentDims:
        queries: int | None = None
        if self.get("q_lora_rank") is not None:
            queries = self.positive("q_lora_rank")
        return LatentDims(
            queries=queries,
            latent=self.positive("kv_lora_rank"),
            rotated=self.positive("qk_rope_head_dim"),
            plain=self.positive("qk_nope_head_dim"),
            value=self.positive("v_head_dim"),
        )

    def window(self) -> int | None:
        """Reads how many of the last positions each one sees in all layers; None: all."""
        stated = self.get("sliding_window")
        if stated is None:
            return None
        return self.as_count(self.name("sliding_window"), stated)

    def require(self, field: str, *values: Any, only: str) -> None:
        """Adds a problem unless the field is absent, null or one of the values; ``only`` says what is supported."""
        actual = self.get(field)
        if actual is not None and actual not in values:
            self.problems.append(f"{self.name(field)}: {shown(actual)} is not supported (only {only})")

    def dims(self) -> Dims:
        """Reads the decoder's sizes."""
        hidden = self.positive("hidden_size")
        mlp_ratio = self.family.mlp_ratio
        heads = self.positive("num_attention_heads")
        mla: LatentDims | None = None
        if self.family.latent:
            mla = self._latent_dims()
            head_dim = mla.plain + mla.rotated
        else:
            head_dim = self.positive("head_dim", hidden // heads)
        delta: DeltaDims | None = None
        if "linear_attention" in self.family.layer_types:
            delta = self._delta_dims()
        experts = 0
        expert_ffn = 0
        if "num_experts" in self.family.fields:
            experts = self.positive("num_experts")
            expert_ffn = self.positive("moe_intermediate_size")
        shared_ffn = 0
        if self.family.shared_expert == "gated":
            shared_ffn = self.positive("shared_expert_intermediate_size")
        elif self.family.shared_expert == "plain":
            shared_ffn = self.positive("n_shared_experts") * expert_ffn
        dims = Dims(
            vocab=self.positive("vocab_size"),
            hidden=hidden,
            ffn=self.positive("intermediate_size", mlp_ratio and mlp_ratio * hidden),
            layers=self.positive("num_hidden_layers"),
            heads=heads,
            kv_heads=self.positive("num_key_value_heads", heads),
            head_dim=head_dim,
            positions=self.positive("max_position_embeddings"),
            experts=experts,
            expert_ffn=expert_ffn,
            shared_ffn=shared_ffn,
            delta=delta,
            mla=mla,
        )
        if dims.heads % dims.kv_heads:
            field = self.name("num_key_value_heads")
            self.problems.append(f"{field}: {dims.kv_heads} does not divide the {dims.heads} heads")
        if self.family.rotary and dims.rotary_dim % 2:
            field = "head_dim" if mla is None else "qk_rope_head_dim"
            self.problem(field, dims.rotary_dim, "is odd, which rotary embeddings cannot split")
        if dims.layers * dims.experts > _MAX_EXPERTS:
            problem = f"{dims.layers} layers x {dims.experts} experts are more than {_MAX_EXPERTS}"
            self.problems.append(f"{self.name('num_experts')}: {problem}")
        return dims

    def _delta_dims(self) -> DeltaDims:
        dims = DeltaDims(
            key_heads=self.positive("linear_num_key_heads"),
            value_heads=self.positive("linear_num_value_heads"),
            key_dim=self.positive("linear_key_head_dim"),
            value_dim=self.positive("linear_value_head_dim"),
            width=self.positive("linear_conv_kernel_dim"),
        )
        if dims.value_heads % dims.key_heads:
            rule = f"does not divide the {dims.value_heads} value heads"
            self.problem("linear_num_key_heads", dims.key_heads, rule)
        return dims

    def dtype(self) -> str:
        """Reads the dtype of the stored weights; HF's default is float32."""
        stated = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        name = str(stated).removeprefix("torch.")
        if name not in ITEM_BYTES:
            supported = ", ".join(ITEM_BYTES)
            self.problems.append(f"dtype: {shown(name, str)} is not supported; supported are {supported}")
        return name

    def refuse_uncommon(self) -> None:
        """Adds problems for features that no family supports."""
        self.require("attention_dropout", 0, only="0: trainer and engine must agree without randomness")
        self.require("is_causal", True, only="causal decoders")
        self.require("quantization_config", only="weights that are not quantised")
        for names in self.family.fields.values():
            stated = [self.config[name] for name in names if self.config.get(name) is not None]
            if any(value != stated[0] for value in stated):
                self.problem(", ".join(names), stated, "differ, and are names of one field")
        kinds: Any = self.get("layer_types") or []
        if not isinstance(kinds, list):
            kinds = [kinds]
        for kind in cast(list[Any], kinds):
            if kind not in self.family.layer_types:
                rule = f"is not supported (only {', '.join(self.family.layer_types)})"
                self.problems.append(f"layer_types: {shown(kind, str)} {rule}")
                break
