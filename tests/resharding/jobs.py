"""Jobs of the ranks of the sync tests: two trainer ranks, then two engine ranks, of a tiny model."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.models import ModelSpec, model_spec
from megarl.resharding import Connection, Receiver, Sender, SyncError, SyncSpec, SyncStats, connect
from megarl.resharding.buckets import bucket_views, recv_views
from megarl.resharding.sync_barrier import PeerError, open_store
from megarl.resharding.transfers.cuda import NcclTransport
from megarl.resharding.transfers.gloo import GlooTransfer as Transfer
from megarl.resharding.transfers.gloo import GlooTransport
from megarl.resharding.transfers.transfer import Transport, Write
from megarl.types import Layout
from megarl.weights.plan import Message, TransferPlan
from megarl.weights.planner import Holder, plan
from megarl.weights.shard_map import Box, ShardMap
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


def single_map() -> ShardMap:
    """All that an engine of one rank holds."""
    return spec_of().vllm_map(1, 0)


def single_holders() -> list[Holder]:
    """A trainer and an engine of the same shards."""
    return [Holder(rank=rank, map=single_map()) for rank in range(2)]


def single_plan() -> TransferPlan:
    """From rank 0 to rank 1."""
    trainer, engine = single_holders()
    return plan([trainer], [engine], 4096)


def weights(shard_map: ShardMap, scale: float = 1.0, model: ModelSpec | None = None) -> dict[str, torch.Tensor]:
    """A holder's parameters; every canonical element has a value of its own (exact in float32)."""
    arrays = held(shard_map, numbered((model or spec_of()).canonical()))
    return {name: torch.from_numpy((array * scale).astype(np.float32)) for name, array in arrays.items()}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Spied:
    """Wraps a transport: records its messages, and calls a function before a send.

    Args:
        before: called with the number of the send, from 1, the peer and the buffer.
        staging: bytes of the memory that buffers lie in, by its address.
        carried: bytes sent and received, by peer.
    """

    inner: Transport
    before: Callable[[int, int, torch.Tensor], None] = lambda *_: None
    sends: int = 0
    staging: dict[int, int] = field(default_factory=dict)
    carried: Counter[int] = field(default_factory=Counter)

    @property
    def connected(self) -> bool:
        return self.inner.connected

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        self.sends += 1
        self.before(self.sends, peer, buffer)
        self._note(peer, buffer)
        return self.inner.send(peer, tag, buffer)

    def receive(self, peer: int, tag: int, buffer: torch.Tensor) -> Transfer:
        self._note(peer, buffer)
        return self.inner.receive(peer, tag, buffer)

    def _note(self, peer: int, buffer: torch.Tensor) -> None:
        note_storage(self.staging, buffer)
        self.carried[peer] += buffer.nbytes

    def abort(self) -> None:
        self.inner.abort()

    def close(self) -> None:
        self.inner.close()


def note_storage(staging: dict[int, int], tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    staging[storage.data_ptr()] = storage.nbytes()


def count_put(connection: Connection) -> Counter[int]:
    """The payload bytes that the rank writes into receive buffers from now on, by receiver."""
    put: Counter[int] = Counter()
    send = connection.ways[False].send

    def counted(message: Message, write: Write) -> None:
        def writing(targets: Sequence[torch.Tensor]) -> None:
            put[message.receiver] += sum(target.nbytes for target in targets)
            write(targets)

        send(message, writing)

    connection.ways[False].send = counted
    return put


class Rank:
    """One rank of a connection, a sender or a receiver, and its records."""

    def __init__(self, spec: SyncSpec, rank: int) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.order: list[str] = []
        self.loads = 0
        self.staging: dict[int, int] = {}
        self.params: dict[str, torch.Tensor] = {}
        self.before_load: Callable[[int], None] = lambda _: None
        self.connection: Connection = connect(spec.only([rank]), rank)
        self.put = count_put(self.connection)
        self.control = self.connection.control = Spied(self.connection.control)
        if self.connection.wire is not None:
            self.connection.wire = Spied(self.connection.wire, staging=self.staging)
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        if rank < TRAINERS:
            self.params = weights(trainer_map(rank))
            self.sender = Sender(self.connection, self.params)
        else:
            self.receiver = Receiver(self.connection, self.load)

    def load(self, params: Mapping[str, torch.Tensor], box: Box | None) -> None:
        """Keeps a bucket; joins the parts of a parameter."""
        self.before_load(self.loads)
        self.loads += 1
        infos = self.connection.spec.recv_buffers[self.connection.rank].params
        for name, tensor in params.items():
            note_storage(self.staging, tensor)
            if box is None:
                self.loaded[name] = tensor.clone()
            else:
                self.loaded.setdefault(name, tensor.new_full(infos[name].shape, -1.0))[box.slices] = tensor
            if box is None or box.stop == infos[name].shape:
                self.order.append(name)

    def sync(self, version: int) -> Any:
        """The statistics, or the message of the error and the seconds that it took."""
        start = time.monotonic()
        try:
            return self.sender.send(version) if self.sender else self.receiver.receive(version)
        except SyncError as error:
            return str(error), time.monotonic() - start

    @property
    def state(self) -> tuple[int, bool, int]:
        """Version, consistency, buckets loaded so far."""
        if self.sender:
            return self.sender.version, True, 0
        return self.receiver.version, self.receiver.consistent, self.loads

    @property
    def carried(self) -> tuple[Counter[int], Counter[int]]:
        """Payload bytes by peer: written to others' memory, and sent or received as frames."""
        wire = self.connection.wire
        return self.put, Counter() if wire is None else wire.carried


def two_syncs(rank: int, spec: SyncSpec) -> Any:
    me = Rank(spec, rank)
    first = me.sync(3)
    once = {name: tensor.clone() for name, tensor in me.loaded.items()}
    if me.receiver:
        me.receiver.release()
    for tensor in me.params.values():
        tensor.mul_(2)
    second = me.sync(4)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size() == RANKS, "the default group is not affected"
    carried = me.carried
    me.connection.close()
    return [first, second], once, me.loaded, me.order, carried, me.state


def synced(
    rank: int, spec: SyncSpec, holders: Sequence[Holder], model: ModelSpec, device: str
) -> tuple[SyncStats, dict[str, torch.Tensor]]:
    """One rank of a sync, a trainer's if it sends: its statistics, and what has been loaded.

    Args:
        holders: of both sides, by rank.
        model: whose numbered elements are sent.
        device: "cpu", or "cuda" for the one GPU that the process sees.
    """
    own = holders[rank].map
    connection = connect(spec.only([rank]), rank, device)
    if rank not in spec.recv_buffers:
        params = {name: tensor.to(device) for name, tensor in weights(own, model=model).items()}
        stats = Sender(connection, params).send(0)
        connection.close()
        return stats, {}
    loaded = {name: torch.zeros(info.shape) for name, info in own.params.items()}

    def load(params: Mapping[str, torch.Tensor], box: Box | None) -> None:
        for name, tensor in params.items():
            assert tensor.device.type == device
            loaded[name][(box or Box.whole(loaded[name].shape)).slices] = tensor.cpu()

    stats = Receiver(connection, load).receive(0)
    connection.close()
    return stats, loaded


def exchanged(rank: int, port: int, name: str, ranks: int, nbytes: int, device: str) -> dict[int, list[int]]:
    """Every rank sends two buffers to every other, the second without waiting for the first; the bytes that came."""
    others = [peer for peer in range(ranks) if peer != rank]
    store = open_store("127.0.0.1", port, name)
    if device == "cpu":
        transport: Transport = GlooTransport(store, range(ranks), rank, others, 60.0)
    else:
        transport = NcclTransport(
            store,
            range(ranks),
            rank,
            name=name,
            to=others,
            from_=others,
            device=torch.device(device),
            timeout_s=60.0,
            look=lambda: None,
        )
    arrived: dict[int, list[torch.Tensor]] = {}
    transfers: list[Any] = []
    for peer in others:
        arrived[peer] = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        transfers += [transport.receive(peer, 0, buffer) for buffer in arrived[peer]]
    sent = [torch.full((nbytes,), 10 * turn + rank, dtype=torch.uint8, device=device) for turn in range(2)]
    for peer in others:
        transfers += [transport.send(peer, 0, buffer) for buffer in sent]
    for transfer in transfers:
        transfer.wait("no bytes")
    values = {peer: [value for buffer in arrived[peer] for value in buffer.unique().tolist()] for peer in others}
    transport.close()
    return values


def staging(rank: int, spec: SyncSpec) -> tuple[int, int]:
    """Bytes of staging memory: what the statistics say, and what transfers and loads have used."""
    me = Rank(spec, rank)
    return me.sync(0).peak_staging_bytes, sum(me.staging.values())


def failing_load(rank: int, spec: SyncSpec, fail: int, at: int) -> Any:
    """One rank's load raises, once it has loaded some buckets."""
    me = Rank(spec, rank)

    def before_load(count: int) -> None:
        if rank == fail and count >= at:
            raise ValueError("the layer has no room")

    me.before_load = before_load
    first, state = me.sync(1), me.state
    return first, state, me.sync(2)


def corrupted(rank: int, spec: SyncSpec, odd: int, at: int) -> Any:
    """An element is changed after its checksum was made: in a frame in transit, or in the receive buffer."""
    me = Rank(spec, rank)

    def change_frame(count: int, _peer: int, frame: torch.Tensor) -> None:
        if count == at:
            frame[0] ^= 1

    def change_landed(count: int, peer: int, numbers: torch.Tensor) -> None:
        if count == at:
            (message,) = (m for m in spec.senders[rank].messages if (m.receiver, m.bucket) == (peer, int(numbers[1])))
            buffer = spec.recv_buffers[peer]
            views = bucket_views(me.connection.mapped[peer], buffer, message.bucket)
            element = recv_views(message, buffer.buckets[message.bucket], views)[0]
            element[(0,) * element.ndim] += 1

    if rank == odd and me.connection.wire is not None:
        me.connection.wire.before = change_frame
    elif rank == odd:
        me.control.before = change_landed
    first, state = me.sync(1), me.state
    return first, state, me.sync(2)


def killed(rank: int, spec: SyncSpec, odd: int, when: str) -> Any:
    """A process is killed: before a sync, between two messages, during a load, or before its commit."""
    me = Rank(spec, rank)
    if rank == odd:
        if when == "before":
            die()
        if when == "sending":
            me.control.before = lambda count, *_: die() if count == 3 else None
        if when == "loading":
            me.before_load = lambda count: die() if count >= 2 else None
        if when == "committing":
            meet = me.connection.barrier.meet
            me.connection.barrier.meet = lambda place, *facts: die() if place.endswith("done") else meet(place, *facts)
    return me.sync(1), me.state


def peer_killed(rank: int, spec: SyncSpec) -> list[str]:
    """Rank 0 dies; the errors of rank 2's transfers with it, in progress and started later."""
    control = Rank(spec, rank).control
    if rank == 0:
        die()
    if rank != 2:
        return []
    told: list[str] = []
    for start in (control.receive, control.receive, control.send):
        transfer = start(0, 1, torch.zeros(8))
        try:
            transfer.wait("not done")
        except PeerError as error:
            told.append(str(error))
    return told


def late(rank: int, spec: SyncSpec, missing: int, patience: float) -> Any:
    me = Rank(spec, rank)
    me.connection.barrier.timeout_s = patience
    if rank == missing:
        time.sleep(patience + 3)
    first, state = me.sync(1), me.state
    dist.barrier()
    return first, state, me.sync(2), me.state


def wrong_plan(rank: int, spec: SyncSpec, other: SyncSpec, odd: int) -> str:
    """One rank follows another plan, under the same name."""
    try:
        Rank(replace(other, name=spec.name) if rank == odd else spec, rank)
    except SyncError as error:
        return str(error)
    return "connected"


def versions(rank: int, spec: SyncSpec, asked: dict[int, list[int]]) -> Any:
    me = Rank(spec, rank)
    return [(me.sync(version), me.state) for version in asked[rank]]


def misshapen(rank: int, spec: SyncSpec) -> Any:
    me = Rank(spec, rank)
    if rank == 1:
        del me.params["0:decoder.final_layernorm.weight"]
        name = "0:decoder.layers.1.mlp.linear_fc2.weight"
        me.params[name] = me.params[name][:3]
    return me.sync(1), me.state
