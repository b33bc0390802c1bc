"""The model whose weights move, and who holds what of it: shard maps, buckets and values, but no Megatron."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megarl.models import ModelSpec, model_spec
from megarl.types import Layout
from megarl.weights.plan import TransferPlan
from megarl.weights.planner import Holder, plan
from megarl.weights.shard_map import ShardMap

ACTOR = Layout(tp=2, pp=2)
ENGINE_TP = 2
TRAINERS = range(ACTOR.world_size)
ENGINES = range(ACTOR.world_size, ACTOR.world_size + ENGINE_TP)
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is measured.

    Args:
        dtype: of all weights.
        bucket_mib: of our transfer.
        layers: a multiple of 2, the stages; 16 make 248 million parameters.
    """

    dtype: str
    bucket_mib: float
    layers: int

    @property
    def config(self) -> dict[str, object]:
        """The model's ``config.json``."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 32768,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "dtype": self.dtype,
        }

    @property
    def spec(self) -> ModelSpec:
        return model_spec(self.config)

    def actor_map(self, rank: int) -> ShardMap:
        """What a trainer rank holds."""
        return _actor_map(self, rank)

    def plan(self) -> TransferPlan:
        """Ours: ranks are the trainers', then the engine's, all of them on one node."""
        sources = [Holder(rank=rank, map=self.actor_map(rank)) for rank in TRAINERS]
        shard_maps = [self.spec.vllm_map(ENGINE_TP, rank) for rank in range(ENGINE_TP)]
        engines = [Holder(rank=rank, map=shard_map) for rank, shard_map in zip(ENGINES, shard_maps, strict=True)]
        return plan(sources, engines, int(self.bucket_mib * MIB))

    def values(self, rank: int, seed: int) -> dict[str, torch.Tensor]:
        """A trainer rank's parameters: random, and equal wherever ranks hold the same elements."""
        shard_map = self.actor_map(rank)
        regions: dict[str, list[str]] = {name: [] for name in shard_map.params}
        for shard in shard_map.shards:
            regions[shard.param].append(f"{shard.name}{shard.region}")
        values: dict[str, torch.Tensor] = {}
        for name, info in shard_map.params.items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {regions[name]}".encode()))
            drawn = torch.empty(info.shape).normal_(1.0 if "norm" in name else 0.0, 0.03, generator=generator)
            values[name] = drawn.to(getattr(torch, info.dtype))
        return values


@functools.cache
def _actor_map(setup: Setup, rank: int) -> ShardMap:
    return setup.spec.megatron_map(ACTOR, rank)


@dataclass(frozen=True, kw_only=True)
class FullTensor:
    """Where a whole canonical tensor lies in the baseline's buffer."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FullBucket:
    """Whole HF tensors that the baseline moves at once.

    Args:
        stage: whose they are.
        params: the Megatron parameters that hold them.
        tensors: by name.
        nbytes: of all of them.
    """

    stage: int
    params: tuple[str, ...]
    tensors: dict[str, FullTensor]
    nbytes: int


def full_buckets(setup: Setup, limit: int) -> list[FullBucket]:
    """The whole model, stage by stage, in buckets of at most ``limit`` bytes that no layer straddles."""
    canonical = setup.spec.canonical()
    made: list[FullBucket] = []
    for stage in range(ACTOR.pp):
        shard_map = setup.actor_map(stage * ACTOR.tp)
        held: dict[str, set[str]] = {}
        for shard in shard_map.shards:
            held.setdefault(shard.param, set()).add(shard.name)
        params: list[str] = []
        names: set[str] = set()
        for layer in _layers(shard_map.params):
            more = set().union(*(held[param] for param in layer))
            if params and sum(canonical[name].nbytes for name in names | more) > limit:
                made.append(_bucket(setup, stage, params, names))
                params, names = [], set()
            params += layer
            names |= more
        made.append(_bucket(setup, stage, params, names))
    return made


def _layers(params: Iterable[str]) -> list[list[str]]:
    """Parameters that belong together, in their order: those of a layer, and each of the others."""
    groups: dict[str, list[str]] = {}
    for name in params:
        words = name.split(".")
        groups.setdefault(".".join(words[:3]) if words[1] == "layers" else name, []).append(name)
    return list(groups.values())


def _bucket(setup: Setup, stage: int, params: list[str], names: set[str]) -> FullBucket:
    offset, tensors = 0, {}
    for name, info in setup.spec.canonical().items():
        if name in names:
            tensors[name] = FullTensor(offset=offset, nbytes=info.nbytes, shape=info.shape)
            offset += info.nbytes
    return FullBucket(stage=stage, params=tuple(params), tensors=tensors, nbytes=offset)
