"""Shard maps of random models and layouts against tensors that are split and fused by hand."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models import ModelSpec, model_spec
from megarl.models.transformer_engine import name_in_maps
from megarl.types import Layout
from megarl.weights.shard_map import Box, ShardMap
from tests.unit_profile import fewer
from tests.weights import naive
from tests.weights.models import CONFIGS, Arrays, gpt2_config, held, llama_config, mixtral_config, numbered


@st.composite
def sizes(draw: st.DrawFn, family: str, tp: int) -> dict[str, Any]:
    """A config of a family that TP splits, with odd sizes wherever it may have them."""
    groups = draw(st.sampled_from([n for n in (1, 2, 3, 6) if n % tp == 0 or tp % n == 0]))
    per_group = tp // math.gcd(groups, tp) * draw(st.integers(1, 2))
    head = draw(st.sampled_from([n for n in (2, 4, 6, 8) if (groups * (per_group + 2) * n) % tp == 0]))
    heads = groups * per_group
    tied, vocab, layers = draw(st.booleans()), draw(st.sampled_from([2, 61, 131])), draw(st.integers(1, 6))
    if family == "gpt2":
        heads = tp * draw(st.integers(1, 3))
        sizes = {"n_embd": heads * draw(st.sampled_from([1, 3])), "n_head": heads, "n_layer": layers}
        inner = draw(st.sampled_from([None, 5 * tp]))
        return gpt2_config(**sizes, n_inner=inner, n_positions=7, vocab_size=vocab, tie_word_embeddings=tied)
    ffn = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    kinds: dict[str, Any] = {}
    if family == "several_kinds":
        layers += 1
        dense = draw(st.lists(st.integers(0, layers - 1), min_size=1, max_size=layers - 1, unique=True))
        kinds = {"mlp_only_layers": dense, "moe_intermediate_size": tp * draw(st.sampled_from([1, 3]))}
    config = CONFIGS[family](
        hidden_size=heads * head if family == "qwen2" else draw(st.sampled_from([5, 6])),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        **{ffn: tp * draw(st.sampled_from([1, 3]))},
        **kinds,
    )
    if family != "qwen2":
        config["head_dim"] = head
    if family == "llama":
        config["attention_bias"] = config["mlp_bias"] = draw(st.booleans())
    return config


@st.composite
def placed(draw: st.DrawFn, family: str) -> tuple[dict[str, Any], Layout]:
    """A config, and a layout that fits it."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6]))
    config = draw(sizes(family, tp))
    layers = config["n_layer" if family == "gpt2" else "num_hidden_layers"]
    pp = draw(st.integers(1, min(3, layers)))
    vpp = draw(st.integers(1, layers // pp)) if pp > 1 else 1
    ep = draw(st.integers(1, 2)) if "num_experts_per_tok" in config else 1
    if ep > 1:
        config["num_local_experts" if family == "mixtral" else "num_experts"] = 4
    return config, Layout(tp=tp, pp=pp, vpp=vpp, ep=ep, dp=ep * draw(st.integers(1, 2)))


def assert_holds(shard_map: ShardMap, hf: Arrays, expected: Arrays) -> None:
    actual = held(shard_map, hf)
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


def assert_tiled(maps: Iterable[ShardMap], spec: ModelSpec, head: str, replicas: int, *, even: bool = True) -> None:
    """Every element of a canonical tensor is held, and by as many of the holders as any other one of the tensor.

    Args:
        replicas: how many times all holders together have everything, at least.
        even: false where some elements of a tensor have more holders than others.
    """
    holders: Counter[tuple[str, Box]] = Counter()
    for shard_map in maps:
        holders.update((shard.name, shard.region) for shard in shard_map.shards)
    counts = {name: np.zeros(info.shape, int) for name, info in spec.canonical(head).items()}
    for (name, region), count in holders.items():
        counts[name][region.slices] += count
    for name, count in counts.items():
        assert count.min() >= replicas, name
        assert count.min() == count.max() or not even, name


@pytest.mark.parametrize("family", CONFIGS)
@settings(deadline=None, max_examples=fewer(40))
@given(st.data())
def test_megatron_maps_are_megatrons_fused_weights(family: str, data: st.DataObject) -> None:
    config, layout = data.draw(placed(family))
    head = data.draw(st.sampled_from(["lm", "value"]))
    spec = model_spec(config)
    hf = numbered(spec.canonical(head))
    rank = data.draw(st.integers(0, layout.world_size - 1))
    chunks = [spec.layers(layout, layout.coords(rank).pp, chunk) for chunk in range(layout.vpp)]
    model = naive.Model(config, hf)
    expected = naive.megatron(model, layout, rank, head, chunks, tied=config["tie_word_embeddings"])
    assert_holds(spec.megatron_map(layout, rank, head), hf, expected)

    maps = (spec.megatron_map(layout, rank, head) for rank in range(layout.world_size))
    assert_tiled(maps, spec, head, replicas=layout.dp // layout.ep)


@pytest.mark.parametrize("family", CONFIGS)
@settings(deadline=None, max_examples=fewer(30))
@given(st.data())
def test_vllm_maps_are_vllms_fused_weights(family: str, data: st.DataObject) -> None:
    tp = data.draw(st.sampled_from([1, 2, 4]))
    config = data.draw(sizes(family, tp))
    if family in ("mixtral", "qwen3_moe", "several_kinds"):
        config["num_local_experts" if family == "mixtral" else "num_experts"] = 5
    spec = model_spec(config)
    hf = numbered(spec.canonical())
    maps = [spec.vllm_map(tp, rank) for rank in range(tp)]
    for rank, shard_map in enumerate(maps):
        assert_holds(shard_map, hf, naive.vllm(naive.Model(config, hf), tp, rank))
    shared = family == "phi3"  # KV heads that several ranks hold are in one tensor with queries
    assert_tiled(maps, spec, "lm", replicas=1, even=not shared)


@pytest.mark.parametrize("family", CONFIGS)
@settings(deadline=None, max_examples=10)
@given(st.data())
def test_checkpoint_maps_are_megatrons_global_tensors(family: str, data: st.DataObject) -> None:
    config = data.draw(sizes(family, 1))
    head, vocab_padding = data.draw(st.sampled_from(["lm", "value"])), data.draw(st.integers(0, 3))
    spec = model_spec(config)
    hf = numbered(spec.canonical(head))
    rows = config["vocab_size"] + vocab_padding
    shard_map = spec.checkpoint_map(head, vocab_rows=rows if vocab_padding else None)
    assert_holds(shard_map, hf, naive.checkpoint(naive.Model(config, hf), head, rows))
    assert_tiled([shard_map], spec, head, replicas=1)


def test_a_checkpoint_without_transformer_engine_has_a_separate_norm_before_experts() -> None:
    spec = model_spec(mixtral_config())
    fused, own = "decoder.layers.mlp.linear_fc1.layer_norm_weight", "decoder.layers.pre_mlp_layernorm.weight"
    with_engine, without = spec.checkpoint_map().params, spec.checkpoint_map(transformer_engine=False).params
    assert set(with_engine) - set(without) == {own}
    assert set(without) - set(with_engine) == {fused}
    dense = model_spec(llama_config())
    assert dense.checkpoint_map() == dense.checkpoint_map(transformer_engine=False)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_maps_have_the_parameters_of_both_kinds_of_layers(family: str) -> None:
    """Megatron's checkpoints have Transformer Engine's names of all norms."""
    spec = model_spec(CONFIGS[family]())
    ours = {re.sub(r"^0:|(?<=layers\.)\d+\.", "", name) for name in spec.megatron_map(Layout(), 0).params}
    theirs = {re.sub(r"(?<=layers\.)\d+\.", "", name) for name in spec.checkpoint_map().params}
    norms = {name for name in ours if "layernorm" in name}
    assert {name_in_maps(name) for name in theirs if "norm" in name} == norms
    assert theirs & norms < norms
    assert {name_in_maps(name) for name in ours} == ours


@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_of_a_module_are_loaded_together(family: str) -> None:
    tp = 3 if family == "qwen3" else 2
    changes = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    changes |= {"intermediate_size": 36} if family == "qwen3" else {}
    shard_map = model_spec(CONFIGS[family](**changes)).vllm_map(tp, 0)
    modules = [name.rpartition(".")[0] for name in shard_map.params]
    starts = [module for i, module in enumerate(modules) if i == 0 or modules[i - 1] != module]
    assert len(starts) == len(set(starts))
