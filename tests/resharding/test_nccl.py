"""The order of NCCL's transfers, and whether they fit a GPU, by a model of its rules: threads are ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier, Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from megarl.resharding import SyncError
from megarl.resharding.sync_barrier import PeerError
from megarl.resharding.transfers import cuda
from megarl.resharding.transfers.cuda import NcclTransfer as Transfer
from megarl.resharding.transfers.cuda import NcclTransport, blocks_of
from megarl.resharding.transfers.frames import Frames
from tests.resharding.ways import SYNCS, Connections, Sync, in_threads

Sends = dict[int, list[int]]
"""Ranks to which ranks send."""

REAL_OPTIONS: Any = torch.distributed.ProcessGroupNCCL.Options if torch.distributed.is_nccl_available() else None
WAIT_S = 60.0
MULTIPROCESSORS = 132
"""Of an H100."""
QUEUES = 8
"""A process's hardware queues; CUDA_DEVICE_MAX_CONNECTIONS sets another number, as Megatron's TP wants."""


def new_options() -> Any:
    """torch's options; a stand-in where torch is built without NCCL."""
    if torch.distributed.is_nccl_available():
        return REAL_OPTIONS()
    return SimpleNamespace(group_name="", _timeout=None, config=SimpleNamespace(min_ctas=-(2**31), max_ctas=-(2**31)))


@dataclass(eq=False, kw_only=True)
class Kernel:
    """One rank's end of a transfer."""

    sends: bool
    buffer: torch.Tensor
    blocks: int
    queue: int
    previous: Kernel | None
    partner: Kernel | None = None
    running: bool = False
    done: bool = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        assert self.done


@dataclass
class Communicator:
    """Two ranks with a stream each, on which kernels run one after the other; the nth of both make a transfer."""

    blocks: int
    met: Barrier = field(default_factory=lambda: Barrier(2, timeout=WAIT_S))
    streams: dict[int, list[Kernel]] = field(default_factory=lambda: defaultdict(list))


class Nccl:
    """In place of torch's ProcessGroupNCCL: a communicator for each pair of a group, made at its first transfer.

    What is assumed of a GPU: a kernel's blocks, one for each of NCCL's channels, take a multiprocessor each, which has
    65,536 registers; they have 640 threads (enqueue.cc) of up to 96 (common.mk). They spin until the partner's kernel
    runs too and the copy is done, and nothing of the same process preempts them. Kernels start in the order of their
    launches: one whose blocks do not all fit holds up those behind it, and one whose stream is not ready those of the
    same hardware queue. A GPU may do better: start a kernel in parts, or two blocks on a multiprocessor.

    Args:
        blocks: blocks of a kernel if the communicator's options do not limit them: NCCL's default, at most 32 between
            two GPUs on NVSwitch (ncclTopoComputeP2pChannels).
        queues: hardware queues of each rank, to which its streams are given in turn.
    """

    def __init__(self, blocks: int = 32, queues: int = QUEUES) -> None:
        self.default, self.queues = blocks, queues
        self.communicators: dict[tuple[int, frozenset[int]], Communicator] = {}
        self.groups: Counter[int] = Counter()
        self.launched: dict[int, list[Kernel]] = defaultdict(list)
        self.streams: Counter[int] = Counter()
        self.names: set[str] = set()
        self.lock = Lock()

    Options = staticmethod(new_options)

    def __call__(self, _store: Any, rank: int, _size: int, options: Any) -> Any:
        with self.lock:
            group = self.groups[rank]
            self.groups[rank] += 1
            self.names.add(options.group_name)
        nccl, config = self, options.config
        blocks = min(self.default, config.max_ctas) if config.max_ctas > 0 else self.default

        class Group:
            def send(self, tensors: list[torch.Tensor], peer: int, _tag: int) -> Kernel:
                return nccl.start((group, blocks), rank, peer, tensors[0], sends=True)

            def recv(self, tensors: list[torch.Tensor], peer: int, _tag: int) -> Kernel:
                return nccl.start((group, blocks), rank, peer, tensors[0], sends=False)

            def abort(self) -> None:
                pass

            shutdown = abort

        return Group()

    def start(self, group: tuple[int, int], rank: int, peer: int, buffer: torch.Tensor, *, sends: bool) -> Kernel:
        """Launches a kernel; the first one of each rank waits for the other's."""
        number, blocks = group
        with self.lock:
            pair = number, frozenset({rank, peer})
            communicator = self.communicators.setdefault(pair, Communicator(blocks))
            stream = communicator.streams[rank]
        if not stream:
            communicator.met.wait()
        with self.lock:
            if stream:
                queue = stream[0].queue
            else:
                queue = self.streams[rank] % self.queues
                self.streams[rank] += 1
            previous = stream[-1] if stream else None
            kernel = Kernel(sends=sends, buffer=buffer, blocks=communicator.blocks, queue=queue, previous=previous)
            theirs = communicator.streams[peer]
            if len(stream) < len(theirs):
                kernel.partner = theirs[len(stream)]
                kernel.partner.partner = kernel
            stream.append(kernel)
            self.launched[rank].append(kernel)
            while self._go_on():
                pass
        return kernel

    def waiting(self, rank: int) -> list[Kernel]:
        """The kernels of a rank that have not started."""
        return [kernel for kernel in self.launched[rank] if not kernel.running]

    def occupied(self, rank: int) -> int:
        """The multiprocessors of a rank's device that kernels occupy."""
        return sum(kernel.blocks for kernel in self.launched[rank] if kernel.running)

    def _go_on(self) -> bool:
        """Starts what can start, and ends what can end; returns whether anything ended."""
        for rank in self.launched:
            held: set[int] = set()
            occupied = self.occupied(rank)
            for kernel in self.waiting(rank):
                if kernel.queue in held:
                    continue
                if kernel.previous is not None and not kernel.previous.done:
                    held.add(kernel.queue)
                    continue
                if occupied + kernel.blocks > MULTIPROCESSORS:
                    break
                kernel.running = True
                occupied += kernel.blocks
        ended = False
        for kernels in self.launched.values():
            for kernel in kernels:
                other = kernel.partner
                if kernel.sends and kernel.running and other is not None and other.running and not other.sends:
                    other.buffer.copy_(kernel.buffer)
                    kernel.done = other.done = ended = True
        for rank, kernels in self.launched.items():
            self.launched[rank] = [kernel for kernel in kernels if not kernel.done]
        return ended


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "multiprocessors", lambda _: MULTIPROCESSORS)


def test_a_peer_that_does_not_answer_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise torch.distributed.DistError("gone")

    class Group:
        Options = staticmethod(new_options)

        def __init__(self, *_: Any) -> None:
            pass

        def send(self, *_: Any) -> SimpleNamespace:
            return SimpleNamespace(is_completed=lambda: True, wait=lost)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    store = HashStore()
    store.set("multiprocessors/1", "132")
    with pytest.raises(PeerError, match=r"^NCCL: the transfer with rank 1 failed: gone$"):
        connected(store, [0, 1], 0, to=[1], from_=[])


def connected(store: Store, ranks: Sequence[int], rank: int, **options: Any) -> NcclTransport:
    """A transport of the model."""
    given = {"timeout_s": WAIT_S, "look": lambda: None, **options}
    return NcclTransport(store, ranks, rank, name="sync s", device=torch.device("cpu"), **given)


def exchange(sends: Sends, wait_s: float = WAIT_S) -> dict[int, dict[int, int]]:
    """Every rank receives from all that send to it, then sends, then waits, as in the first bucket of a sync.

    Returns:
        By rank, the number that came from each peer. Raises PeerError if the ranks wait for each other.
    """
    ranks = sorted({*sends, *(peer for peers in sends.values() for peer in peers)})
    store = HashStore()

    def rank(own: int) -> dict[int, int]:
        to, from_ = sends.get(own, []), [rank for rank, peers in sends.items() if own in peers]
        transport = connected(store, ranks, own, to=to, from_=from_, timeout_s=wait_s)
        came = {peer: torch.zeros(1, dtype=torch.int64) for peer in from_}
        # In an order in which the first transfers of a ring of ranks wait for each other.
        transfers: list[Transfer] = [transport.receive(peer, 0, came[peer]) for peer in reversed(from_)]
        transfers += [transport.send(peer, 0, torch.tensor([100 * own + peer])) for peer in to]
        for transfer in transfers:
            transfer.wait("no number")
        return {peer: int(number) for peer, number in came.items()}

    with ThreadPoolExecutor(len(ranks)) as threads:
        return dict(zip(ranks, threads.map(rank, ranks), strict=True))


def all_to_all(ranks: Sequence[int]) -> Sends:
    return {rank: [peer for peer in ranks if peer != rank] for rank in ranks}


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Nccl], Nccl]:
    """Makes a model take the place of NCCL."""

    def use(nccl: Nccl) -> Nccl:
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
        return nccl

    return use


LAYOUTS: dict[str, Sends] = {
    "each other": {0: [1], 1: [0]},
    "a ring": {0: [1], 1: [2], 2: [0]},
    "a ring the other way": {0: [2], 2: [1], 1: [0]},
    "all to all of 4": all_to_all((1, 3, 4, 8)),
    "all to all of 8": all_to_all(range(8)),
    "8 trainers to 8 engines": {rank: list(range(8, 16)) for rank in range(8)},
    "all to all of 16, on two nodes": all_to_all(range(16)),
}


@pytest.mark.parametrize("queues", [QUEUES, 1])
@pytest.mark.parametrize("sends", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_that_send_and_receive_do_not_deadlock(use: Any, sends: Sends, queues: int) -> None:
    nccl = use(Nccl(queues=queues))
    expected: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, peers in sends.items():
        for peer in peers:
            expected[peer][rank] = 100 * rank + peer
    assert exchange(sends) == {rank: expected[rank] for rank in sorted({*sends, *expected})}
    assert nccl.names == {"sync s up", "sync s down"}


def connect_as_gpus(way: Frames) -> None:
    """Does what ``Frames.connect`` does on GPUs."""
    connection, spec, rank = way.connection, way.connection.spec, way.connection.rank
    to, from_ = spec.network_receivers(rank), spec.network_senders(rank)
    timeouts: Any = {"timeout_s": spec.timeout_s, "look": connection.barrier.look_ahead}
    store = PrefixStore("wire", connection.store)
    connection.wire = connected(store, spec.wire, rank, to=to, from_=from_, **timeouts)


@pytest.mark.parametrize("queues", [QUEUES, 1])
@pytest.mark.parametrize("case", SYNCS.values(), ids=SYNCS)
def test_syncs_complete(use: Any, monkeypatch: pytest.MonkeyPatch, case: Sync, queues: int) -> None:
    """Whole syncs of several buckets, whose frames go by the transport of GPUs."""
    use(Nccl(queues=queues))
    monkeypatch.setattr(Frames, "connect", connect_as_gpus)
    spec = case.check(Connections(), in_threads, "cpu")
    assert len(spec.wire) > 1
    assert max(len(buffer.buckets) for buffer in spec.recv_buffers.values()) > 2


@pytest.fixture
def default(use: Any, monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """NCCL without our limit of blocks."""
    monkeypatch.setattr(cuda, "blocks_of", lambda *_: 32)
    monkeypatch.setattr(cuda, "multiprocessors", lambda _: 2 * 15 * 32)  # what the transport believes
    return use(Nccl())


def test_an_all_to_all_of_8_with_nccls_default_hangs(default: Nccl) -> None:
    """Receiving kernels fill every GPU, and the sends that they wait for do not start."""
    with pytest.raises(PeerError, match=r"^no number: the transfer with rank \d took more than 2 s$"):
        exchange(LAYOUTS["all to all of 8"], wait_s=2.0)
    for rank in range(8):
        assert default.occupied(rank) == 4 * 32, "no fifth kernel fits"
        assert len(default.waiting(rank)) == 10


def test_a_sync_with_nccls_default_hangs(default: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frames, "connect", connect_as_gpus)
    with pytest.raises(SyncError, match=r"took more than 5 s|Timed out waiting 5000ms"):
        SYNCS["TP8 to 8 engines"].check(Connections(), in_threads, "cpu", timeout_s=5.0)
    assert {default.occupied(rank) for rank in range(8)} == {4 * 32}


def test_4_ranks_with_nccls_default_do_not_hang(default: Nccl) -> None:
    exchange(LAYOUTS["all to all of 4"])


@pytest.mark.parametrize(("queues", "hangs"), [(1, True), (2, False)])
def test_a_kernel_waits_behind_another_stream_of_its_queue(queues: int, hangs: bool) -> None:
    nccl, none = Nccl(queues=queues), torch.zeros(1)
    nccl.communicators = {(group, frozenset({0, 1})): Communicator(4, met=Barrier(1)) for group in (0, 1)}
    for _ in range(2):
        nccl.start((0, 4), 0, 1, none, sends=False)
    behind = nccl.start((1, 4), 0, 1, none, sends=True)
    assert behind.running != hangs


@pytest.mark.parametrize(("ranks", "blocks"), [(2, 4), (8, 4), (9, 4), (10, 2), (17, 2), (18, 1), (34, 1), (500, 1)])
def test_all_transfers_of_a_rank_fit_half_of_a_gpu(ranks: int, blocks: int) -> None:
    assert blocks_of(ranks, MULTIPROCESSORS) == blocks
    assert blocks == 1 or 2 * (ranks - 1) * blocks <= 66


def test_the_smallest_gpu_sets_the_blocks_of_all_ranks(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = use(Nccl())
    counts = iter([108, *[MULTIPROCESSORS] * 7])
    monkeypatch.setattr(cuda, "multiprocessors", lambda _: next(counts))
    exchange(LAYOUTS["all to all of 8"])
    assert {communicator.blocks for communicator in nccl.communicators.values()} == {2}


def test_a_rank_with_more_transfers_than_fit_a_gpu_is_refused(use: Any) -> None:
    use(Nccl())
    store = HashStore()
    for rank in range(1, 68):
        store.set(f"multiprocessors/{rank}", "132")
    refusal = r"^rank 0 has 134 transfers .* a GPU runs 132 at once: use engines with less TP"
    with pytest.raises(ValueError, match=refusal):
        connected(store, range(68), 0, to=range(1, 68), from_=range(1, 68))
