"""What the ranks of the sync tests run: two trainer ranks, then two engine ranks, of a tiny model."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.resharding import GlooTransport, Receiver, Sender, SyncError, SyncSpec
from megarl.resharding.board import Board
from megarl.resharding.transport import Transfer
from megarl.types import Layout
from megarl.weights.planner import Holder, plan
from megarl.weights.plans import TransferPlan
from megarl.weights.regions import ShardMap
from megarl.weights.specs import ModelSpec, model_spec
from tests.weights.models import held, numbered, qwen2_config

TRAINERS, ENGINES, RANKS = 2, 2, 4


def spec_of(dtype: str = "float32") -> ModelSpec:
    return model_spec(qwen2_config(tie_word_embeddings=True), dtype=dtype)


def trainer_map(rank: int) -> ShardMap:
    return spec_of().megatron_map(Layout(pp=TRAINERS), rank)


def engine_map(rank: int, dtype: str = "float32") -> ShardMap:
    return spec_of(dtype).vllm_map(ENGINES, rank - TRAINERS)


def transfer_plan(bucket_bytes: int = 4096, dtype: str = "float32") -> TransferPlan:
    sources = [Holder(rank=rank, map=trainer_map(rank)) for rank in range(TRAINERS)]
    engines = [Holder(rank=rank, map=engine_map(rank, dtype)) for rank in range(TRAINERS, RANKS)]
    return plan(sources, engines, bucket_bytes)


def weights(shard: ShardMap, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """A holder's parameters; every canonical element has a value of its own (exact in float32)."""
    arrays = held(shard, numbered(spec_of().canonical()))
    return {name: torch.from_numpy((array * scale).astype(np.float32)) for name, array in arrays.items()}


def note_storage(staging: dict[int, int], tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    staging[storage.data_ptr()] = storage.nbytes()


@dataclass
class Faulty:
    """A transport in front of another, with which things go wrong.

    Args:
        flip: after this many sends, a byte of a frame is changed on the way.
        hang_up: after this many sends the rank breaks its connections and is gone.
        staging: bytes of the memory that buffers to send or to fill lie in, by its address.
    """

    inner: GlooTransport
    flip: int = -1
    hang_up: int = -1
    sends: int = 0
    staging: dict[int, int] = field(default_factory=dict)
    rank: int = field(init=False)
    size: int = field(init=False)
    board: Board = field(init=False)
    sent: Counter[int] = field(init=False)
    received: Counter[int] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("rank", "size", "board", "sent", "received"):
            setattr(self, name, getattr(self.inner, name))

    @property
    def connected(self) -> bool:
        return self.inner.connected

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        self.sends += 1
        note_storage(self.staging, buffer)
        if self.sends == self.flip:
            buffer[0] ^= 1
        if self.sends == self.hang_up:
            self.inner.abort()
            raise SystemExit
        return self.inner.send(peer, tag, buffer)

    def receive(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        note_storage(self.staging, buffer)
        return self.inner.receive(peer, tag, buffer)

    def abort(self) -> None:
        self.inner.abort()

    def close(self) -> None:
        self.inner.close()


class Rank:
    """One rank of a connection, a sender or a receiver, and what it has seen."""

    def __init__(self, spec: SyncSpec, rank: int, **faults: int) -> None:
        spec = spec.only([rank])
        self.loaded: dict[str, torch.Tensor] = {}
        self.order: list[str] = []
        self.params: dict[str, torch.Tensor] = {}
        self.fail_at: str | None = None
        self.transport = GlooTransport(spec, rank)
        transport = Faulty(self.transport, **faults)
        self.staging = transport.staging
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        if rank < TRAINERS:
            self.params = weights(trainer_map(rank))
            self.sender = Sender(spec.sender(rank), self.params, transport, verify=spec.verify)
        else:
            self.receiver = Receiver(spec.receivers[rank], transport, self.load, verify=spec.verify)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == self.fail_at:
            raise ValueError(f"{name}: no room")
        note_storage(self.staging, tensor)
        self.order.append(name)
        self.loaded[name] = tensor.clone()

    def sync(self, version: int) -> Any:
        """The statistics, or the message of the error and the seconds that it took."""
        start = time.monotonic()
        try:
            return self.sender.send(version) if self.sender else self.receiver.receive(version)
        except SyncError as error:
            return str(error), time.monotonic() - start

    @property
    def state(self) -> tuple[int, bool, int]:
        """Version, consistency, parameters loaded so far."""
        if self.sender:
            return self.sender.version, True, 0
        return self.receiver.version, self.receiver.consistent, len(self.order)


def two_syncs(rank: int, spec: SyncSpec) -> Any:
    me = Rank(spec, rank)
    first = me.sync(3)
    once = dict(me.loaded)
    for tensor in me.params.values():
        tensor.mul_(2)
    second = me.sync(4)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size() == RANKS, "the default group is not affected"
    sent, received = dict(me.transport.sent), dict(me.transport.received)
    me.transport.close()
    return [first, second], once, me.loaded, me.order, (sent, received), me.state


def staging(rank: int, spec: SyncSpec) -> tuple[int, int]:
    """Bytes of staging memory: what the statistics say, and what transfers and loads have used."""
    me = Rank(spec, rank)
    return me.sync(0).peak_staging_bytes, sum(me.staging.values())


def faulty(rank: int, spec: SyncSpec, faults: dict[int, dict[str, int]], fail_at: dict[int, str]) -> Any:
    me = Rank(spec, rank, **faults.get(rank, {}))
    me.fail_at = fail_at.get(rank)
    try:
        first = me.sync(1)
    except SystemExit:
        return None
    return first, me.state, me.sync(2)


def late(rank: int, spec: SyncSpec, missing: int, patience: float) -> Any:
    me = Rank(spec, rank)
    me.transport.board.timeout_s = patience
    if rank == missing:
        time.sleep(patience + 0.5)
    first, state = me.sync(1), me.state
    dist.barrier()
    return first, state, me.sync(2), me.state


def misled(rank: int, spec: SyncSpec, other: SyncSpec, odd: int) -> Any:
    """One rank follows another plan, under the same name."""
    me = Rank(replace(other, name=spec.name) if rank == odd else spec, rank)
    return me.sync(1), me.state


def versions(rank: int, spec: SyncSpec, asked: dict[int, list[int]]) -> Any:
    me = Rank(spec, rank)
    return [(me.sync(version), me.state) for version in asked[rank]]


def incomplete(rank: int, spec: SyncSpec, odd: int) -> Any:
    """A receiver whose part of the plan has lost a message."""
    if rank == odd:
        part = spec.receivers[rank]
        spec = replace(spec, receivers={rank: replace(part, messages=(part.messages[0][1:], *part.messages[1:]))})
    me = Rank(spec, rank)
    return me.sync(1), me.state


def misshapen(rank: int, spec: SyncSpec) -> Any:
    me = Rank(spec, rank)
    if rank == 1:
        del me.params["0:decoder.final_layernorm.weight"]
        name = "0:decoder.layers.1.mlp.linear_fc2.weight"
        me.params[name] = me.params[name][:3]
    return me.sync(1), me.state
