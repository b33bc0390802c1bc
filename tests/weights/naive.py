"""Each engine's tensors from whole Hugging Face ones, by splitting, reshaping and concatenating them: no maps."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.types import Layout
from tests.weights.models import Arrays


def padded(array: np.ndarray, rows: int) -> np.ndarray:
    return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])


class Model:
    """A model's HF arrays, with matrices as [outputs, inputs] and projections one by one."""

    def __init__(self, config: dict[str, Any], hf: Arrays) -> None:
        self.config, self.hf = config, hf
        self.gpt2 = config["model_type"] == "gpt2"
        self.heads = config["n_head" if self.gpt2 else "num_attention_heads"]
        self.groups = config.get("num_key_value_heads") or self.heads
        self.layers = config["n_layer" if self.gpt2 else "num_hidden_layers"]
        self.experts = config.get("num_local_experts") or config.get("num_experts") or 0
        self.dense = [] if self.experts else list(range(self.layers))
        self.dense += config.get("mlp_only_layers", [])

    @property
    def embedding(self) -> np.ndarray:
        return self.hf["transformer.wte.weight" if self.gpt2 else "model.embed_tokens.weight"]

    def get(self, layer: int, name: str, kind: str) -> np.ndarray | None:
        """A matrix or vector of a layer by one name for all families; None where the family has none."""
        prefix = f"transformer.h.{layer}." if self.gpt2 else f"model.layers.{layer}."
        if self.gpt2 and name in ("q", "k", "v"):
            whole = self.hf[f"{prefix}attn.c_attn.{kind}"].T
            return np.split(whole, 3)["qkv".index(name)]
        if self.config["model_type"] == "phi3" and name in ("q", "k", "v", "gate", "up"):
            return self._phi3(prefix, name, kind)
        gpt2 = {"norm1": "ln_1", "o": "attn.c_proj", "norm2": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj"}
        moe = "block_sparse_moe" if self.config["model_type"] == "mixtral" else "mlp"
        others = {
            "norm1": "input_layernorm",
            "norm2": "post_attention_layernorm",
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
            "router": f"{moe}.gate",
            **{letter: f"self_attn.{letter}_proj" for letter in "qkvo"},
            **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
        }
        array = self.hf.get(f"{prefix}{(gpt2 if self.gpt2 else others).get(name, '?')}.{kind}")
        return array.T if self.gpt2 and array is not None and array.ndim == 2 else array

    def _phi3(self, prefix: str, name: str, kind: str) -> np.ndarray | None:
        fused = self.hf.get(f"{prefix}{'mlp.gate_up' if name in ('gate', 'up') else 'self_attn.qkv'}_proj.{kind}")
        if fused is None:
            return None
        if name in ("gate", "up"):
            return np.split(fused, 2)[name == "up"]
        head = len(fused) // (self.heads + 2 * self.groups)
        cuts = [self.heads * head, (self.heads + self.groups) * head]
        return np.split(fused, cuts)["qkv".index(name)]

    def expert(self, layer: int, expert: int, part: str) -> np.ndarray:
        if self.config["model_type"] == "mixtral":
            name = {"gate": "w1", "up": "w3", "down": "w2"}[part]
            return self.hf[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight"]
        return self.hf[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"]

    def top(self, head: str) -> Arrays:
        """The final norm and the head, by Megatron's names; the language model's head as it is in the files."""
        norm = "transformer.ln_f" if self.gpt2 else "model.norm"
        arrays = {f"decoder.final_layernorm.{kind}": self.hf.get(f"{norm}.{kind}") for kind in ("weight", "bias")}
        arrays["output_layer.weight"] = self.hf.get("lm_head.weight" if head == "lm" else "score.weight")
        return {name: array for name, array in arrays.items() if array is not None}


def megatron_layer(model: Model, layer: int, tp: int, rank: int, experts: range) -> Arrays:
    """Megatron's tensors of a layer on one TP rank, with some of the experts."""

    def chunk(array: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.split(array, tp, axis)[rank]

    arrays: dict[str, np.ndarray | None] = {}
    for kind in ("weight", "bias"):
        q, k, v = (model.get(layer, name, kind) for name in "qkv")
        if q is not None and k is not None and v is not None:
            head = len(q) // model.heads
            grouped = [x.reshape(model.groups, -1, head, *x.shape[1:]) for x in (q, k, v)]
            arrays[f"self_attention.linear_qkv.{kind}"] = chunk(
                np.concatenate(grouped, axis=1).reshape(-1, *q.shape[1:])
            )
        gate, up = (model.get(layer, name, kind) for name in ("gate", "up"))
        if up is not None:
            both = [up] if gate is None else [gate, up]
            arrays[f"mlp.linear_fc1.{kind}"] = np.concatenate([chunk(x) for x in both])
        for own, name in (("self_attention.linear_proj", "o"), ("mlp.linear_fc2", "down")):
            array = model.get(layer, name, kind)
            arrays[f"{own}.{kind}"] = chunk(array, 1) if kind == "weight" and array is not None else array
        whole = {"input_layernorm": "norm1", "pre_mlp_layernorm": "norm2", "mlp.router": "router"}
        whole |= {f"self_attention.{letter}_layernorm": f"{letter}_norm" for letter in "qk"}
        arrays |= {f"{own}.{kind}": model.get(layer, name, kind) for own, name in whole.items()}
    if layer not in model.dense:
        each = [[model.expert(layer, expert, part) for part in ("gate", "up", "down")] for expert in experts]
        first = [np.concatenate([chunk(gate), chunk(up)]) for gate, up, _ in each]
        arrays["mlp.experts.linear_fc1.weight"] = np.array(first)
        arrays["mlp.experts.linear_fc2.weight"] = np.array([chunk(down, 1) for _, _, down in each])
    return {name: array for name, array in arrays.items() if array is not None}


def megatron(model: Model, layout: Layout, rank: int, head: str, chunks: list[range], tied: bool) -> Arrays:
    """What a Megatron rank holds.

    Args:
        chunks: the layers of each of its model chunks.
    """
    at = layout.coords(rank)
    multiple = 64 * layout.tp
    rows = (len(model.embedding) + multiple - 1) // multiple * multiple

    def vocab(array: np.ndarray) -> np.ndarray:
        return np.split(padded(array, rows), layout.tp)[at.tp]

    arrays: Arrays = {}
    if at.pp == 0:
        arrays["0:embedding.word_embeddings.weight"] = vocab(model.embedding)
        if model.gpt2:
            arrays["0:embedding.position_embeddings.weight"] = model.hf["transformer.wpe.weight"]
    share = model.experts // layout.ep
    mine = range(at.dp % layout.ep * share, (at.dp % layout.ep + 1) * share)
    for chunk, layers in enumerate(chunks):
        for i, layer in enumerate(layers):
            own = megatron_layer(model, layer, layout.tp, at.tp, mine)
            arrays |= {f"{chunk}:decoder.layers.{i}.{name}": array for name, array in own.items()}
    if at.pp == layout.pp - 1:
        last = f"{layout.vpp - 1}:"
        arrays |= {f"{last}{name}": array for name, array in model.top(head).items()}
        output = f"{last}output_layer.weight"
        if head == "lm" and output in arrays:
            arrays[output] = vocab(arrays[output])
        elif head == "lm" and tied and layout.pp > 1:
            arrays[output] = vocab(model.embedding)
    return arrays


def checkpoint(model: Model, head: str, rows: int) -> Arrays:
    """The global tensors of a Megatron checkpoint."""
    arrays: Arrays = {"embedding.word_embeddings.weight": padded(model.embedding, rows)}
    if model.gpt2:
        arrays["embedding.position_embeddings.weight"] = model.hf["transformer.wpe.weight"]
    arrays |= model.top(head)
    if head == "lm" and "output_layer.weight" in arrays:
        arrays["output_layer.weight"] = padded(arrays["output_layer.weight"], rows)
    layers = [megatron_layer(model, layer, 1, 0, range(model.experts)) for layer in range(model.layers)]
    if 0 < len(model.dense) < model.layers:
        return arrays | _layers_by_name(model, layers)
    for name in layers[0]:
        array = np.stack([layer[name] for layer in layers])
        key = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if not model.experts:
            key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        arrays[f"decoder.layers.{_experts_key(key)}"] = array
    return arrays


def _experts_key(key: str) -> str:
    return key.replace("mlp.experts.", "mlp.experts.experts.")


def _layers_by_name(model: Model, layers: list[Arrays]) -> Arrays:
    """Layers of several kinds in a Megatron checkpoint: those of a name are not one tensor, but experts are."""
    arrays: Arrays = {}
    for number, layer in enumerate(layers):
        for name, array in layer.items():
            key = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            if number in model.dense:
                key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            arrays[f"decoder.layers.{number}.{_experts_key(key)}"] = array
    return arrays


def vllm(model: Model, tp: int, rank: int) -> Arrays:
    """What a TP rank of vLLM holds."""
    rows = (len(model.embedding) + 63) // 64 * 64

    def chunk(array: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.split(array, tp, axis)[rank]

    first = "transformer.wte" if model.gpt2 else "model.embed_tokens"
    arrays: Arrays = {f"{first}.weight": chunk(padded(model.embedding, rows))}
    if model.gpt2:
        arrays["transformer.wpe.weight"] = model.hf["transformer.wpe.weight"]
    for layer in range(model.layers):
        arrays |= _vllm_layer(model, layer, tp, rank)
    norm = "transformer.ln_f" if model.gpt2 else "model.norm"
    top = model.top("lm")
    arrays |= {f"{norm}.{name.rpartition('.')[2]}": array for name, array in top.items() if "norm" in name}
    if "output_layer.weight" in top:
        arrays["lm_head.weight"] = chunk(padded(top["output_layer.weight"], rows))
    return arrays


def _vllm_layer(model: Model, layer: int, tp: int, rank: int) -> Arrays:
    def chunk(array: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.split(array, tp, axis)[rank]

    names = {"qkv": "self_attn.qkv_proj", "o": "self_attn.o_proj", "in": "mlp.gate_up_proj", "down": "mlp.down_proj"}
    if model.gpt2:
        names = {"qkv": "attn.c_attn", "o": "attn.c_proj", "in": "mlp.c_fc", "down": "mlp.c_proj"}
    prefix = f"transformer.h.{layer}." if model.gpt2 else f"model.layers.{layer}."
    arrays: dict[str, np.ndarray | None] = {}
    for kind in ("weight", "bias"):
        q, k, v = (model.get(layer, name, kind) for name in "qkv")
        if q is not None and k is not None and v is not None:
            holders = min(tp, model.groups)
            kv = [np.split(x, holders)[rank * holders // tp] for x in (k, v)]
            arrays[f"{names['qkv']}.{kind}"] = np.concatenate([chunk(q), *kv])
        gate, up = (model.get(layer, name, kind) for name in ("gate", "up"))
        if up is not None:
            both = [up] if gate is None else [gate, up]
            arrays[f"{names['in']}.{kind}"] = np.concatenate([chunk(x) for x in both])
        for part in ("o", "down"):
            array = model.get(layer, part, kind)
            arrays[f"{names[part]}.{kind}"] = chunk(array, 1) if kind == "weight" and array is not None else array
        norms = ("ln_1", "ln_2") if model.gpt2 else ("input_layernorm", "post_attention_layernorm")
        arrays |= {
            f"{own}.{kind}": model.get(layer, name, kind) for own, name in zip(norms, ("norm1", "norm2"), strict=True)
        }
        arrays |= {f"self_attn.{x}_norm.{kind}": model.get(layer, f"{x}_norm", kind) for x in "qk"}
    if layer not in model.dense:
        moe = "block_sparse_moe" if model.config["model_type"] == "mixtral" else "mlp"
        each = [[model.expert(layer, e, part) for part in ("gate", "up", "down")] for e in range(model.experts)]
        arrays[f"{moe}.gate.weight"] = model.get(layer, "router", "weight")
        arrays[f"{moe}.experts.routed_experts.w13_weight"] = np.array(
            [np.concatenate([chunk(gate), chunk(up)]) for gate, up, _ in each]
        )
        arrays[f"{moe}.experts.routed_experts.w2_weight"] = np.array([chunk(down, 1) for _, _, down in each])
    return {f"{prefix}{name}": array for name, array in arrays.items() if array is not None}
