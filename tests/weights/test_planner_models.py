"""Plans for random models of every family, layouts and places: each element arrives once, from the nearest holder."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models import ModelSpec, model_spec
from megarl.resharding.spec import engine_holders, trainer_holders
from megarl.types import Layout
from megarl.weights.plan import TransferPlan
from megarl.weights.planner import Distance, Holder, Place, plan
from megarl.weights.shard_map import ShardMap
from tests.unit_profile import fewer
from tests.weights import models
from tests.weights.models import numbered
from tests.weights.test_planner import check, check_buckets

EXPERTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "several_kinds": "num_experts"}
SEED = 3


@st.composite
def transfers(draw: st.DrawFn) -> tuple[ModelSpec, Layout, Layout, int, int]:
    """A model, two layouts of trainers, and the TP and number of engines."""
    family = draw(st.sampled_from(sorted(models.CONFIGS)))
    unit = draw(st.sampled_from([2, 3, 4]))
    degree = st.sampled_from([n for n in (1, 2, 3, 4) if unit % n == 0])
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if unit % n == 0 or n % unit == 0]))
    heads = max(kv_heads, unit) * draw(st.sampled_from([1, 2]))
    chunks = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]))
    layers = draw(st.integers(4, 7))
    experts = family in EXPERTS
    changes: dict[str, Any] = {"vocab_size": draw(st.sampled_from([61, 64, 131]))}
    changes["tie_word_embeddings"] = draw(st.booleans())
    if family == "gpt2":
        changes |= {"n_head": heads, "n_embd": unit * heads, "n_layer": layers, "n_inner": 3 * unit}
    else:
        ffn = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
        changes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": layers}
        if family == "several_kinds":
            changes["moe_intermediate_size"] = unit
        changes |= {ffn: 3 * unit} | ({} if family == "qwen2" else {"head_dim": 2 * unit})
        changes["hidden_size"] = 2 * unit * heads if family in ("qwen2", "phi3") else draw(st.sampled_from([6, 10]))
    if experts:
        changes[EXPERTS[family]] = 4
    spec = model_spec(models.CONFIGS[family](**changes))

    def layout() -> Layout:
        ep = draw(st.sampled_from([1, 2])) if experts else 1
        pp, vpp = chunks
        return Layout(tp=draw(degree), pp=pp, vpp=vpp, ep=ep, dp=ep * draw(st.sampled_from([1, 2])))

    engine_tp = draw(st.sampled_from([n for n in (1, 2, 4) if unit % n == 0]))  # vLLM pads the vocabulary to 64s
    return spec, layout(), replace(layout(), pp=1, vpp=1), engine_tp, draw(st.integers(1, 3))


def places(count: int, per_node: int, first: int = 0) -> list[Place]:
    return [Place(node=i // per_node, device=i) for i in range(first, first + count)]


@settings(max_examples=15, deadline=None)
@given(transfers(), st.sampled_from([1000, 4000, 1 << 30]), st.integers(1, 4), st.booleans())
def test_plans_of_every_family_and_layout_are_exact(
    transfer: tuple[ModelSpec, Layout, Layout, int, int], bucket_bytes: int, per_node: int, colocated: bool
) -> None:
    spec, layout, other, tp, replicas = transfer
    canonical = numbered(spec.canonical())
    size = layout.world_size
    trainers = trainer_holders(spec, layout, places(size, per_node))
    engines = engine_holders(spec, tp, places(tp * replicas, per_node, 0 if colocated else size), first=size)
    elsewhere = trainer_holders(spec, other, places(other.world_size, per_node), first=size)
    files = [Holder(rank=-1, map=ShardMap.identity(spec.canonical()))]
    for sources, destinations in ((trainers, engines), (files, trainers), (trainers, files), (trainers, elsewhere)):
        made = plan(sources, destinations, bucket_bytes)
        check(made, sources, destinations, canonical)
        for receiver in made.receivers.values():
            if receiver.buckets[0].params[0] == next(iter(destinations[0].map.params)):
                check_buckets(receiver, bucket_bytes)
            assert all(bucket.nbytes <= bucket_bytes for bucket in receiver.buckets)
        check_nearest(made, sources, destinations)
        shuffled = [random.Random(SEED).sample(side, len(side)) for side in (sources, destinations)]
        assert plan(*shuffled, bucket_bytes) == made


def check_nearest(made: TransferPlan, sources: list[Holder], destinations: list[Holder]) -> None:
    """Checks that each copy comes from the nearest holder of the same box under the same name."""
    receivers = {holder.rank: holder for holder in destinations}
    holders = {holder.rank: holder for holder in sources}
    boxes = {holder.rank: {(p.name, p.region) for p in holder.map.shards} for holder in sources}
    for sender in made.senders.values():
        shards = {shard.param: shard for shard in holders[sender.rank].map.shards}
        single = {p for p in shards if sum(shard.param == p for shard in holders[sender.rank].map.shards) == 1}
        for message in sender.messages:
            receiver = receivers[message.receiver]
            for param in {copy.source for copy in message.copies} & single:
                box = shards[param].name, shards[param].region
                nearest = min(holders[rank].distance(receiver) for rank in boxes if box in boxes[rank])
                assert holders[sender.rank].distance(receiver) == nearest, (param, sender.rank, message.receiver)


@settings(max_examples=fewer(25), deadline=None)
@given(transfers(), st.sampled_from([500, 3000, 1 << 30]), st.integers(1, 4), st.integers(2, 4))
def test_equally_near_replicas_send_equal_amounts(
    transfer: tuple[ModelSpec, Layout, Layout, int, int], bucket_bytes: int, per_node: int, more: int
) -> None:
    spec, layout, _, tp, replicas = transfer
    layout = replace(layout, dp=layout.ep * more)
    size = layout.world_size
    trainers = trainer_holders(spec, layout, places(size, per_node))
    away = -(-size // per_node) * per_node
    engines = engine_holders(spec, tp, places(tp * replicas, per_node, away), first=size)
    made = plan(trainers, engines, bucket_bytes)
    assert {t.distance(e) for t in trainers for e in engines} == {Distance.NETWORK}
    groups: dict[int, list[int]] = {}
    for holder in trainers:
        groups.setdefault(id(holder.map), []).append(holder.rank)
    assert all(len(ranks) == more for ranks in groups.values())
    for ranks in groups.values():
        sent = [made.senders[rank].nbytes if rank in made.senders else 0 for rank in ranks]
        messages = [m.nbytes for rank in ranks if rank in made.senders for m in made.senders[rank].messages]
        assert max(sent) - min(sent) <= max(messages, default=0)


def test_engines_start_with_different_stages() -> None:
    spec = model_spec(models.qwen2_config(num_hidden_layers=6))
    trainers = trainer_holders(spec, Layout(pp=3), places(3, 1))
    made = plan(trainers, engine_holders(spec, 1, places(3, 1, 3), first=3), 8000)
    buckets = zip(*(receiver.messages for receiver in made.receivers.values()), strict=True)
    asked = [[message.sender for messages in at_once for message in messages] for at_once in buckets]
    assert len(asked) > 10
    assert all(len(set(senders)) > 1 for senders in asked)
