"""A model's specification: canonical tensors, and shard maps in Megatron, its checkpoints and vLLM for any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.decoder_fields import TEXT_CONFIG, decoder_fields
from megarl.models.checkpoint_keys import fused_norms, in_checkpoint, parts_in_checkpoint
from megarl.models.dims import Dims, Engine
from megarl.models.expert_params import Experts
from megarl.models.families import FAMILIES
from megarl.models.hf_config import (
    HF_ACTIVATIONS,
    OUTPUT,
    SCORE,
    Family,
    HFConfig,
    HFConfigReader,
    LayerSpec,
    ParamTable,
    shown,
)
from megarl.models.param_stacks import ShardCoords, Stack
from megarl.models.param_types import (
    ParamType,
    VocabRows,
    canonical_dtypes,
    canonical_shapes,
)
from megarl.models.rope import Rope, read_rope, read_ropes
from megarl.types import HeadName, Layout
from megarl.weights.shard_map import Box, Manifest, Shape, Shard, ShardMap, TensorInfo

_PrefixedStacks = tuple[str, str, Sequence[Stack]]
"""Stacks, which layers share, after the prefixes of their local and canonical names."""


def _family_of(config: HFConfig) -> tuple[Family, HeadName]:
    """Returns the family of a config and the head of its architecture."""
    architectures: Any = config.get("architectures") or []
    model_type: Any = config.get("model_type")
    is_list = isinstance(config.get("architectures") or [], list)
    if not is_list or not all(isinstance(name, str) for name in (model_type or "", *architectures)):
        raise ValueError("architectures is not a list of names, or model_type is not a name")
    if not architectures and (model_type or "") in FAMILIES:
        return FAMILIES[model_type], "lm"
    heads: dict[str, tuple[Family, HeadName]] = {}
    for family in FAMILIES.values():
        heads[family.lm_class] = family, "lm"
        heads[family.score_class] = family, "score"
    if len(architectures) != 1 or architectures[0] not in heads:
        named = f"model_type {shown(model_type)}"
        if architectures:
            named = shown(", ".join(architectures), str)
        supported = ", ".join(heads)
        raise ValueError(f"architecture {named} is not supported; supported are {supported}")
    family, head = heads[architectures[0]]
    if model_type not in (None, family.model_type):
        contradiction = f"contradicts the architecture {architectures[0]}"
        raise ValueError(f"model_type {shown(model_type)} {contradiction}")
    return family, head


def pipeline_layers(layers: int, layout: Layout, stage: int, chunk: int) -> range:
    """Returns the layers of a model chunk.

    The first chunks of all stages come before the second ones. The sizes of chunks differ by at
    most one, and so do those of stages. The shorter chunks are on the last stage, which has the
    output layer, then on the first, which has the embedding.

    Args:
        chunk: index among the virtual stages of the pipeline rank ``stage``.
    """
    pp = layout.pp
    vpp = layout.vpp
    full = -(-layers // (pp * vpp))
    short = -layers % (pp * vpp)
    order: list[int] = []
    for i in range(vpp):
        order.append((vpp - 1 - i) * pp + pp - 1)
        order += range(i * pp, i * pp + pp - 1)
    shorter = order[:short]
    index = chunk * pp + stage
    start = full * index - sum(other < index for other in shorter)
    return range(start, start + full - (index in shorter))


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that follows from a model's HF config.

    Args:
        rope: rotary embeddings; None where positions are learned.
        local_rope: those of layers with windows; None: the same.
        dtype: dtype of every parameter in the maps.
        tied: whether the output layer of the language model is the embedding.
        head: head of the checkpoint.
    """

    family: Family
    config: HFConfig
    dims: Dims
    table: ParamTable
    rope: Rope | None
    local_rope: Rope | None
    dtype: str
    tied: bool
    head: HeadName

    def with_rows_of(self, other: ModelSpec) -> ModelSpec:
        """Returns the model with the embedding's rows of another in Megatron, cut off or padded.

        Over TP, each rank then has the same ids of both.
        """
        return replace(self, dims=replace(self.dims, rows=other.dims.vocab))

    def for_lengths(self, longest: int) -> ModelSpec:
        """Returns the model for sequences of up to ``longest`` tokens: the same but for longrope.

        As in vLLM, one set of factors serves sequences of all lengths; transformers decides for each batch.
        """
        if self.rope is None or self.rope.kind != "longrope":
            return self
        assert self.rope.original is not None
        return replace(self, rope=replace(self.rope, long=longest > self.rope.original))

    @property
    def widest_mlp(self) -> int:
        """Channels of the widest MLP or expert."""
        widths = [self.dims.shared_ffn]
        for kind in self.table.kinds:
            widths.append(self.dims.expert_ffn if kind.is_mixture else self.dims.ffn)
        return max(widths)

    @property
    def untrained(self) -> tuple[str, ...]:
        """Patterns of tensors that pass from a checkpoint into its exports."""
        return (*self.family.untrained, *self.table.untrained)

    @property
    def stores_transposes(self) -> bool:
        """Whether Hugging Face stores matrices as [inputs, outputs], as in GPT-2."""
        stacks = self._stacks(self.table.layers[0].params, "megatron", ShardCoords())
        return any(stack.transposed and not stack.of for stack in stacks)

    def ids_in_use(self, configured: int | None) -> int:
        """Returns the number of token ids that may be sampled: ``model.vocab_size``, if it is set, or all."""
        return configured or self.dims.vocab

    def canonical(self, head: HeadName = "lm") -> dict[str, TensorInfo]:
        """Returns the HF tensors of the model with a head; a tied output layer is not among them."""
        tensors = self._canonical(self._first())
        of_kind = {kind: self._canonical(kind.params) for kind in self.table.kinds}
        for i, kind in enumerate(self.table.layers):
            prefix = self.table.layer_prefix.hf.format(i)
            tensors |= {prefix + name: info for name, info in of_kind[kind].items()}
        return tensors | self._canonical((*self.table.final, *self._output(head)))

    def fixed_dtypes(self) -> dict[str, str]:
        """Returns the dtypes of canonical tensors that keep them whatever the model's is."""
        found: dict[str, str] = {}
        of_kind = {kind: canonical_dtypes(kind.params, self.dims) for kind in self.table.kinds}
        for i, kind in enumerate(self.table.layers):
            prefix = self.table.layer_prefix.hf.format(i)
            for name, dtype in of_kind[kind].items():
                found[prefix + name] = dtype
        return found

    def _canonical(self, params: Sequence[ParamType]) -> dict[str, TensorInfo]:
        dtypes = canonical_dtypes(params, self.dims)
        tensors: dict[str, TensorInfo] = {}
        for name, shape in canonical_shapes(params, self.dims).items():
            tensors[name] = TensorInfo(shape, dtypes.get(name, self.dtype))
        return tensors

    def manifest(self, head: HeadName = "lm", *, new_head: bool = False) -> Manifest:
        """Returns what a checkpoint must contain; with ``new_head`` no value or score head is read."""
        tensors = self.canonical(head)
        output = f"{OUTPUT.names.hf}.weight"
        ignored = ["*.rotary_emb.inv_freq", *self.family.ignored]
        if output not in tensors:
            ignored.append(output)
        if new_head:
            score = f"{SCORE.names.hf}.weight"
            del tensors[score]
            ignored.append(score)
        tied: dict[str, str] = {}
        if self.tied and head == "lm":
            tied[output] = f"{self.table.embedding.names.hf}.weight"
        stacks: dict[str, list[list[str]]] = {}
        for layer, kind in enumerate(self.table.layers):
            prefix = self.table.layer_prefix.hf.format(layer)
            for param in kind.params:
                if isinstance(param, Experts):
                    for name, rows in param.stacked(self.dims).items():
                        stacks[prefix + name] = [[prefix + each for each in of_expert] for of_expert in rows]
        return Manifest(
            tensors=tensors,
            stacks=stacks,
            ignored=tuple(ignored),
            untrained=self.untrained,
            bare_prefix=self.family.bare_prefix,
            tied=tied,
        )

    def hf_config(self, head: HeadName = "lm") -> dict[str, Any]:
        """Returns the ``config.json`` of a checkpoint of the model with this head."""
        config = _with_dtype(self.config, self.dtype)
        if self.family.has_text_config:
            config[TEXT_CONFIG] = _with_dtype(config[TEXT_CONFIG], self.dtype)
        if head == "lm":
            config["architectures"] = [self.family.lm_class]
        else:
            config["architectures"] = [self.family.score_class]
            config["id2label"] = {"0": "LABEL_0"}
            config["label2id"] = {"LABEL_0": 0}
        return config

    def layers(self, layout: Layout, pp: int, chunk: int) -> range:
        """Returns the layers of a model chunk of a pipeline rank."""
        return pipeline_layers(self.dims.layers, layout, pp, chunk)

    def megatron_map(self, layout: Layout, rank: int, head: HeadName = "lm") -> ShardMap:
        """Returns the map of a rank of a role; parameters are named ``{model chunk}:{name in GPTModel}``."""
        self.check_megatron(layout)
        stage = layout.coords(rank).pp
        at = self.shard_coords(layout, rank)
        stacks = self._stacks_of_kinds("megatron", at)
        groups: list[_PrefixedStacks] = []
        if stage == 0:
            groups.append(("0:", "", self._stacks(self._first(), "megatron", at)))
        for local, hf, kind in self.local_layers(layout, rank):
            groups.append((local, hf, stacks[kind]))
        if stage == layout.pp - 1:
            output = self._output(head)
            if self.tied and head == "lm" and layout.pp > 1:  # this stage has a copy of the embedding
                names = replace(OUTPUT.names, hf=self.table.embedding.names.hf)
                output = (VocabRows(names=names),)
            last = self._stacks((*self.table.final, *output), "megatron", at)
            groups.append((f"{layout.vpp - 1}:", "", last))
        return self.map_of(groups)

    def shard_coords(self, layout: Layout, rank: int) -> ShardCoords:
        """Returns the part of each layer that a rank of a role holds."""
        coords = layout.coords(rank)
        return ShardCoords(
            tp_rank=coords.tp,
            tp=layout.tp,
            ep_rank=layout.expert_rank(coords),
            ep=layout.ep,
        )

    def local_layers(self, layout: Layout, rank: int) -> Iterator[tuple[str, str, LayerSpec]]:
        """Yields the layers of a rank of a role: prefixes of their local and canonical names, and their kinds."""
        prefix = self.table.layer_prefix
        for chunk in range(layout.vpp):
            for i, layer in enumerate(self.layers(layout, layout.coords(rank).pp, chunk)):
                local = f"{chunk}:{prefix.megatron.format(i)}"
                yield local, prefix.hf.format(layer), self.table.layers[layer]

    def checkpoint_map(
        self, head: HeadName = "lm", *, vocab_rows: int | None = None, transformer_engine: bool = True
    ) -> ShardMap:
        """Returns the map of the global tensors of a Megatron-LM distributed checkpoint, by their keys.

        Args:
            vocab_rows: rows of embedding and output layer, with padding; by default the vocabulary.
            transformer_engine: whether the modules are Transformer Engine's; otherwise some norms
                have other keys.
        """
        coords = ShardCoords(vocab_rows=vocab_rows or self.dims.vocab)
        outside = (*self._first(), *self.table.final, *self._output(head))
        groups: list[_PrefixedStacks] = [("", "", self._stacks(outside, "megatron", coords))]
        stacks = self._stacks_of_kinds("megatron", coords)
        for i, kind in enumerate(self.table.layers):
            local = self.table.layer_prefix.megatron.format(i)
            leading: tuple[Shape, Shape] = ((), ())
            if self.table.is_uniform:
                local = self.table.layer_prefix.megatron.removesuffix("{}.")
                leading = ((i,), (self.dims.layers,))
            norms = fused_norms(self.dims, kind, transformer_engine=transformer_engine)
            stored: list[Stack] = []
            for stack in stacks[kind]:
                for part in parts_in_checkpoint(stack):
                    stored.append(in_checkpoint(part, leading, norms))
            groups.append((local, self.table.layer_prefix.hf.format(i), stored))
        return self.map_of(groups)

    def is_centred(self, key: str) -> bool:
        """Whether a tensor of a Megatron-LM checkpoint is 1 less than Hugging Face's.

        Megatron multiplies by 1 + weight after delta nets too, where Hugging Face does so in other norms alone.
        """
        zero_centered = bool(self.table.megatron.get("layernorm_zero_centered_gamma"))
        return zero_centered and key.endswith("self_attention.out_norm.weight")

    def vllm_map(self, tp: int, rank: int) -> ShardMap:
        """Returns the map of a TP rank of a vLLM engine, under vLLM's fused names."""
        self.check_vllm(tp)
        coords = ShardCoords(tp_rank=rank, tp=tp)
        prefix = self.table.layer_prefix
        stacks = self._stacks_of_kinds("vllm", coords)
        groups: list[_PrefixedStacks] = [("", "", self._stacks(self._first(), "vllm", coords))]
        for i, kind in enumerate(self.table.layers):
            groups.append((prefix.of("vllm").format(i), prefix.hf.format(i), stacks[kind]))
        last = (*self.table.final, *self._output("lm"))
        groups.append(("", "", self._stacks(last, "vllm", coords)))
        return self.map_of(groups)

    def transformer_fields(self) -> dict[str, Any]:
        """Returns the fields of Megatron's ``TransformerConfig`` of this model."""
        fields: dict[str, Any] = {}
        if self.dims.delta is not None:
            fields = {
                "linear_num_key_heads": self.dims.delta.key_heads,
                "linear_num_value_heads": self.dims.delta.value_heads,
                "linear_key_head_dim": self.dims.delta.key_dim,
                "linear_value_head_dim": self.dims.delta.value_dim,
                "linear_conv_kernel_dim": self.dims.delta.width,
            }
        if self.dims.shared_ffn:
            fields["moe_shared_expert_intermediate_size"] = self.dims.shared_ffn
        window = self.table.layers[0].window
        if window is not None and all(kind.window == window for kind in self.table.kinds):
            fields["window_size"] = (window - 1, 0)
        return {
            "num_layers": self.dims.layers,
            "hidden_size": self.dims.hidden,
            "ffn_hidden_size": self.dims.ffn,
            "num_attention_heads": self.dims.heads,
            "num_query_groups": self.dims.kv_heads,
            "kv_channels": self.dims.head_dim,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **fields,
            **self.table.megatron,
        }

    def gpt_arguments(self, tp: int, head: HeadName = "lm") -> dict[str, Any]:
        """Returns the arguments of Megatron's ``GPTModel`` of this model."""
        positions: dict[str, Any] = {"position_embedding_type": "learned_absolute"}
        if self.rope is not None:
            positions = {"position_embedding_type": "rope", "rotary_percent": self.rope.share}
        return {
            "vocab_size": self.dims.padded_vocab("megatron", tp),
            "max_sequence_length": self.dims.positions,
            "share_embeddings_and_output_weights": self.tied and head == "lm",
            **positions,
        }

    def check_megatron(self, layout: Layout) -> None:
        """Raises ValueError, with every reason, where Megatron cannot hold the model in this layout."""
        dims = self.dims
        chunks = layout.pp * layout.vpp
        qkv = (dims.heads + 2 * dims.kv_heads) * dims.head_dim
        problems = self._tp_problems(layout.tp, {"rows of queries, keys and values": qkv})
        if dims.layers < chunks:
            parts = f"{layout.pp} stages x {layout.vpp} chunks"
            problems.append(f"{parts} are more than the {dims.layers} layers")
        if self.table.megatron.get("attention_output_gate") and layout.tp > dims.kv_heads:
            # There Megatron (0.19.2, attention.py) reads the TP rank of global state, which this package does not set.
            problems.append(f"tp {layout.tp} exceeds the {dims.kv_heads} KV heads of gated attention")
        if layout.vpp > 1 and layout.pp == 1:
            problems.append(f"vpp {layout.vpp} needs pp > 1")
        if layout.ep > 1 and dims.experts == 0:
            model = f"the {self.family.model_type} model"
            problems.append(f"ep {layout.ep} needs experts, which {model} does not have")
        elif dims.experts % layout.ep:
            problems.append(f"ep {layout.ep} does not divide the {dims.experts} experts")
        _refuse("Megatron cannot hold the model in this layout", problems)

    def check_vllm(self, tp: int) -> None:
        """Raises ValueError, with every reason, where vLLM cannot hold the model at this TP."""
        rows = self.dims.padded_vocab("vllm", tp)
        problems = self._tp_problems(tp, {"padded vocabulary rows": rows})
        if 0 < self.dims.experts < tp:
            problems.append(f"tp {tp} exceeds the {self.dims.experts} experts")
        if "softmax_type" in self.table.megatron and tp > self.dims.kv_heads:
            problems.append(f"tp {tp} exceeds the {self.dims.kv_heads} KV heads, which vLLM's gpt-oss does not copy")
        _refuse("vLLM cannot hold the model", problems)

    def _tp_problems(self, tp: int, sizes: Mapping[str, int]) -> list[str]:
        """Returns why TP does not split the model, beside some ``sizes``."""
        dims = self.dims
        split = {"attention heads": dims.heads}
        for kind in self.table.kinds:
            if kind.is_mixture:
                split["channels of an expert"] = dims.expert_ffn
                split["channels of the shared expert"] = dims.shared_ffn
            else:
                split["MLP channels"] = dims.ffn
        if dims.delta is not None:
            split["key heads of delta nets"] = dims.delta.key_heads
        split |= sizes
        problems = [f"tp {tp} does not divide the {size} {what}" for what, size in split.items() if size % tp]
        if dims.kv_heads % tp and tp % dims.kv_heads:
            problems.append(f"neither of tp {tp} and the {dims.kv_heads} KV heads divides the other")
        return problems

    def _first(self) -> tuple[ParamType, ...]:
        if self.table.positions is None:
            return (self.table.embedding,)
        return (self.table.embedding, self.table.positions)

    def _output(self, head: HeadName) -> tuple[ParamType, ...]:
        """Returns the output layer; none where it is tied."""
        if head != "lm":
            return (SCORE,)
        if self.tied:
            return ()
        return (OUTPUT,)

    def _stacks_of_kinds(self, engine: Engine, coords: ShardCoords) -> dict[LayerSpec, list[Stack]]:
        return {kind: self._stacks(kind.params, engine, coords) for kind in self.table.kinds}

    def _stacks(self, param_types: Iterable[ParamType], engine: Engine, coords: ShardCoords) -> list[Stack]:
        stacks: list[Stack] = []
        for param_type in param_types:
            stacks += param_type.stacks(engine, self.dims, coords)
        return stacks

    def map_of(self, groups: Iterable[_PrefixedStacks]) -> ShardMap:
        """Returns the map of a holder of stacks, each group with the prefixes of its local and canonical names."""
        params: dict[str, TensorInfo] = {}
        shards: list[Shard] = []
        padding: list[tuple[str, Box]] = []
        for local, hf, stacks in groups:
            for stack in stacks:
                param = local + stack.param
                params[param] = TensorInfo(stack.of + stack.shape, stack.dtype or self.dtype)
                for box, tensor, region in stack.boxes:
                    if tensor is None:
                        padding.append((param, box))
                    else:
                        shards.append(Shard(param, box, hf + tensor, region, stack.transposed))
        return ShardMap(params=params, shards=tuple(shards), padding=tuple(padding))


def model_spec(config: HFConfig, *, dtype: str | None = None) -> ModelSpec:
    """Returns the specification of a model; raises ValueError, with every problem, for others.

    Args:
        config: fields of its ``config.json``.
        dtype: dtype of the maps; by default the stored one.
    """
    family, head = _family_of(config)
    stated = dict(config)
    if family.has_text_config:
        if not isinstance(config.get(TEXT_CONFIG), Mapping):
            raise ValueError(f"the {family.model_type} model is not supported: its config has no {TEXT_CONFIG}")
        stated = dict(decoder_fields(config))
    if dtype is not None:
        stated["dtype"] = dtype
    reader = HFConfigReader(stated, family)
    dims = reader.dims()
    rope: Rope | None = None
    local_rope: Rope | None = None
    if family.has_local_rope:
        rope, local_rope = read_ropes(reader, dims.head_dim, dims.positions)
    elif family.rotary:
        rope = read_rope(reader, dims.rotary_dim, dims.positions)
    stored = reader.dtype()
    activations = HF_ACTIVATIONS[family.activation]
    reader.require("hidden_act", *activations, only=", ".join(activations))
    reader.refuse_uncommon()
    table = family.describe(reader)
    tied = reader.flag("tie_word_embeddings")
    if family.has_text_config and bool(config[TEXT_CONFIG].get("tie_word_embeddings")) != tied:
        # transformers reads the first, vLLM the second.
        rule = f"is not {tied}, as in the config of the whole model"
        reader.problem(f"{TEXT_CONFIG}.tie_word_embeddings", not tied, rule)
    if reader.problems:
        problems = "\n  ".join(dict.fromkeys(reader.problems))  # some fields are read more than once
        raise ValueError(f"the {family.model_type} model is not supported:\n  {problems}")
    return ModelSpec(
        family=family,
        config=config,
        dims=dims,
        table=table,
        rope=rope,
        local_rope=local_rope,
        dtype=stored,
        tied=tied,
        head=head,
    )


def _with_dtype(config: HFConfig, dtype: str) -> dict[str, Any]:
    fields: dict[str, Any] = {name: value for name, value in config.items() if name != "torch_dtype"}
    fields["dtype"] = dtype
    return fields


def _refuse(what: str, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"{what}: " + "; ".join(problems))
