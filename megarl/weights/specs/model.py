"""A model's spec: its canonical tensors, and its shard maps in Megatron and in vLLM for any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.types import HeadName, Layout
from megarl.weights.regions import Box, Hole, Manifest, Piece, ShardMap, TensorInfo
from megarl.weights.specs.elements import Dims, Element, Engine, ScoreHead, Shard, Stack, VocabRows
from megarl.weights.specs.family import Family, HFConfig, Reader, Rope, Table, UnsupportedModelError
from megarl.weights.specs.llama import LLAMA
from megarl.weights.specs.qwen2 import QWEN2

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (LLAMA, QWEN2)}


@dataclass(frozen=True, kw_only=True)
class MegatronArgs:
    """Plain keyword arguments for Megatron's model; the activation is ``torch.nn.functional.silu``.

    Args:
        transformer: for ``TransformerConfig``.
        gpt: for ``GPTModel``.
    """

    transformer: Mapping[str, Any]
    gpt: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What is known of a model from its HF config.

    Args:
        family: the page that describes it.
        config: the fields of ``config.json``.
        dims: its sizes.
        dtype: of every parameter in the maps.
        tied: the output layer of the language model is the embedding.
        head: what the checkpoint has on top: "lm", or "score".
    """

    family: Family
    config: HFConfig
    dims: Dims
    table: Table
    rope: Rope
    dtype: str
    tied: bool
    head: HeadName

    def canonical(self, head: HeadName = "lm") -> dict[str, TensorInfo]:
        """The model's HF tensors with a given head; a tied output layer is not among them."""
        named: list[tuple[str, Element]] = [("", self.table.embedding)]
        prefix = self.table.layer_prefix.hf
        named += [(prefix.format(i), element) for i in range(self.dims.layers) for element in self.table.layer]
        named += [("", element) for element in (*self.table.final, *self._output(head))]
        return {
            f"{prefix}{name}": TensorInfo(shape, self.dtype)
            for prefix, element in named
            for name, shape in element.tensors(self.dims).items()
        }

    def manifest(self, head: HeadName = "lm", *, new_head: bool = False) -> Manifest:
        """What a checkpoint must contain to be loaded into the model with this head.

        Args:
            new_head: the value or score head is made anew, so that a checkpoint with any head will do.
        """
        tensors, output = self.canonical(head), self.table.output.names.hf
        ignored = ["*.rotary_emb.inv_freq"]
        if f"{output}.weight" not in tensors:
            ignored.append(f"{output}.weight")
        if new_head:
            dropped = tensors.pop(f"{self.table.score.hf}.weight", None)
            assert dropped, "only a value or score head can be new"
            ignored.append(f"{self.table.score.hf}.weight")
        return Manifest(tensors=tensors, ignored=tuple(ignored))

    def hf_config(self, head: HeadName = "lm") -> dict[str, Any]:
        """The ``config.json`` of a checkpoint of the model with this head."""
        config = {name: value for name, value in self.config.items() if name != "torch_dtype"}
        config["dtype"] = self.dtype
        config["architectures"] = [self.family.lm_class if head == "lm" else self.family.score_class]
        if head != "lm":
            config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return config

    def megatron_map(self, layout: Layout, rank: int, head: HeadName = "lm") -> ShardMap:
        """What a rank of a Megatron role holds; its parameters are named ``{model chunk}:{name in GPTModel}``.

        Raises:
            ValueError: the layout does not fit the model; every reason is listed.
        """
        self.check_megatron(layout)
        coords = layout.coords(rank)
        shard = Shard(rank=coords.tp, size=layout.tp)
        per_chunk = self.dims.layers // (layout.pp * layout.vpp)
        stacks: list[tuple[str, str, Stack]] = []
        for chunk in range(layout.vpp):
            first = (chunk * layout.pp + coords.pp) * per_chunk
            local = f"{chunk}:"
            if coords.pp == 0 and chunk == 0:
                stacks += self._stacks((self.table.embedding,), "megatron", shard, local)
            for i in range(per_chunk):
                hf, megatron = self.table.layer_prefix.hf.format(first + i), self.table.layer_prefix.megatron.format(i)
                stacks += self._stacks(self.table.layer, "megatron", shard, local + megatron, hf)
            if coords.pp == layout.pp - 1 and chunk == layout.vpp - 1:
                copied = self.tied and head == "lm" and layout.pp > 1
                output = (self._tied_output(),) if copied else self._output(head)
                stacks += self._stacks((*self.table.final, *output), "megatron", shard, local)
        return self._map(stacks)

    def vllm_map(self, tp: int, rank: int) -> ShardMap:
        """What a TP rank of a vLLM engine holds of the language model, under vLLM's fused names.

        Raises:
            ValueError: TP does not fit the model; every reason is listed.
        """
        self.check_vllm(tp)
        shard = Shard(rank=rank, size=tp)
        stacks = self._stacks((self.table.embedding,), "vllm", shard)
        for i in range(self.dims.layers):
            hf, local = self.table.layer_prefix.hf.format(i), self.table.layer_prefix.vllm.format(i)
            stacks += self._stacks(self.table.layer, "vllm", shard, local, hf)
        stacks += self._stacks((*self.table.final, *self._output("lm")), "vllm", shard)
        return self._map(stacks)

    def padded_vocab(self, tp: int) -> int:
        """The vocabulary of Megatron's model at a TP, padding included."""
        return self.dims.padded_vocab("megatron", tp)

    def transformer(self, tp: int, head: HeadName = "lm") -> MegatronArgs:
        """The arguments with which Megatron builds this model."""
        return MegatronArgs(
            transformer={
                "num_layers": self.dims.layers,
                "hidden_size": self.dims.hidden,
                "ffn_hidden_size": self.dims.ffn,
                "num_attention_heads": self.dims.heads,
                "num_query_groups": self.dims.kv_heads,
                "kv_channels": self.dims.head_dim,
                "layernorm_epsilon": float(self.config.get("rms_norm_eps", 1e-6)),
                "normalization": "RMSNorm",
                "gated_linear_unit": True,
                "add_qkv_bias": self.table.qkv_bias,
                "add_bias_linear": self.table.linear_bias,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
            },
            gpt={
                "vocab_size": self.padded_vocab(tp),
                "max_sequence_length": self.config["max_position_embeddings"],
                "share_embeddings_and_output_weights": self.tied and head == "lm",
                "position_embedding_type": "rope",
                "rotary_percent": 1.0,
                "rotary_base": self.rope.base,
                "rope_scaling": self.rope.llama3_factor is not None,
                "rope_scaling_factor": self.rope.llama3_factor or 1.0,
            },
        )

    def check_megatron(self, layout: Layout) -> None:
        """Raises ValueError, listing every reason, if Megatron cannot hold the model in this layout."""
        dims, tp, stages = self.dims, layout.tp, layout.pp * layout.vpp
        problems = _indivisible(tp, {"attention heads": dims.heads, "MLP channels": dims.ffn})
        if dims.kv_heads % tp:
            problems.append(f"tp {tp} does not divide the {dims.kv_heads} KV heads, which Megatron does not replicate")
        if dims.layers % stages:
            problems.append(f"{layout.pp} stages x {layout.vpp} chunks do not divide the {dims.layers} layers evenly")
        if layout.vpp > 1 and layout.pp == 1:
            problems.append(f"vpp {layout.vpp} needs pp > 1")
        _refuse("Megatron cannot hold the model in this layout", problems)

    def check_vllm(self, tp: int) -> None:
        """Raises ValueError, listing every reason, if vLLM cannot hold the model at this TP."""
        dims = self.dims
        sizes = {
            "attention heads": dims.heads,
            "MLP channels": dims.ffn,
            "padded vocabulary rows": dims.padded_vocab("vllm", tp),
        }
        problems = _indivisible(tp, sizes)
        if dims.kv_heads % tp and tp % dims.kv_heads:
            problems.append(f"neither of tp {tp} and the {dims.kv_heads} KV heads divides the other")
        _refuse("vLLM cannot hold the model", problems)

    def _output(self, head: HeadName) -> tuple[Element, ...]:
        """The output layer as tensors of its own: none where it is tied."""
        if head != "lm":
            return (ScoreHead(names=self.table.score),)
        return () if self.tied else (self.table.output,)

    def _tied_output(self) -> VocabRows:
        """The last stage's copy of a tied embedding: the output layer's names for the embedding's tensor."""
        output, embedding = self.table.output.names, self.table.embedding.names
        return VocabRows(names=type(output)(hf=embedding.hf, megatron=output.megatron, vllm=output.vllm))

    def _stacks(
        self, elements: Iterable[Element], engine: Engine, shard: Shard, local: str = "", hf: str = ""
    ) -> list[tuple[str, str, Stack]]:
        """The stacks of some elements, each with the prefixes of its local and canonical names."""
        return [(local, hf, stack) for element in elements for stack in element.stacks(engine, self.dims, shard)]

    def _map(self, stacks: Iterable[tuple[str, str, Stack]]) -> ShardMap:
        params: dict[str, TensorInfo] = {}
        pieces: list[Piece] = []
        holes: list[Hole] = []
        for local, hf, stack in stacks:
            param = local + stack.param
            params[param] = TensorInfo(stack.shape, self.dtype)
            for part in _parts(param, hf, stack):
                pieces.append(part) if isinstance(part, Piece) else holes.append(part)
        return ShardMap(params=params, pieces=tuple(pieces), holes=tuple(holes))


def model_spec(config: HFConfig, *, dtype: str | None = None) -> ModelSpec:
    """The spec of a model.

    Args:
        config: the fields of its HF ``config.json``.
        dtype: of the parameters in the maps; the config's own by default.

    Raises:
        UnsupportedModelError: no spec describes it; every problem is listed.
    """
    family, head = _family(config)
    reader = Reader(dict(config) if dtype is None else {**config, "dtype": dtype})
    dims, rope = reader.dims(), reader.rope(family.default_rope_base)
    stored = reader.dtype()
    reader.positive("max_position_embeddings")
    reader.common_refusals()
    problems = reader.problems + family.refusals(config)
    if problems:
        raise UnsupportedModelError(f"the {family.model_type} model is not supported:\n  " + "\n  ".join(problems))
    return ModelSpec(
        family=family,
        config=config,
        dims=dims,
        table=family.table(config),
        rope=rope,
        dtype=stored,
        tied=bool(config.get("tie_word_embeddings", False)),
        head=head,
    )


def _family(config: HFConfig) -> tuple[Family, HeadName]:
    """The family of a config and the head that its architecture has."""
    architectures: list[str] = list(config.get("architectures") or [])
    heads: dict[str, tuple[Family, HeadName]] = {}
    for family in FAMILIES.values():
        heads |= {family.lm_class: (family, "lm"), family.score_class: (family, "score")}
    model_type: str | None = config.get("model_type")
    if not architectures and model_type is not None and model_type in FAMILIES:
        return FAMILIES[model_type], "lm"
    if len(architectures) != 1 or architectures[0] not in heads:
        named = ", ".join(architectures) or f"model_type {model_type!r}"
        raise UnsupportedModelError(f"architecture {named} is not supported; supported are {', '.join(heads)}")
    family, head = heads[architectures[0]]
    if model_type not in (None, family.model_type):
        raise UnsupportedModelError(f"model_type {model_type!r} contradicts the architecture {architectures[0]}")
    return family, head


def _parts(param: str, prefix: str, stack: Stack) -> Iterator[Piece | Hole]:
    """The pieces and holes of a stacked parameter."""
    offset = 0
    for part in stack.parts:
        extent = part.stop - part.start
        box = _slab(stack, offset, offset + extent)
        if part.tensor is None:
            yield Hole(param=param, box=box)
        else:
            yield Piece(param=param, box=box, name=prefix + part.tensor, region=_slab(stack, part.start, part.stop))
        offset += extent


def _slab(stack: Stack, start: int, stop: int) -> Box:
    """[start, stop) along the stacked axis, everything along the others."""
    low, high = [0] * len(stack.shape), list(stack.shape)
    low[stack.axis], high[stack.axis] = start, stop
    return Box(tuple(low), tuple(high))


def _indivisible(tp: int, sizes: Mapping[str, int]) -> list[str]:
    return [f"tp {tp} does not divide the {size} {what}" for what, size in sizes.items() if size % tp]


def _refuse(what: str, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"{what}: " + "; ".join(problems))
