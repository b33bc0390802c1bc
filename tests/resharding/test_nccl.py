"""The order of NCCL's transfers, by a model of its rules: threads are ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier, Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megarl.resharding.sync_barrier import PeerError
from megarl.resharding.transfers.cuda import NcclTransfer as Transfer
from megarl.resharding.transfers.cuda import NcclTransport

WAIT_S = 60.0


@dataclass
class Transferring:
    """A transfer on one rank's stream; the next one on the stream waits for it."""

    sends: bool
    buffer: torch.Tensor
    done: bool = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        assert self.done


@dataclass
class Communicator:
    """Two ranks with one stream each; the first transfer of each waits for the other's."""

    met: Barrier = field(default_factory=lambda: Barrier(2, timeout=WAIT_S))
    streams: dict[int, list[Transferring]] = field(default_factory=lambda: defaultdict(list))
    lock: Any = field(default_factory=Lock)

    def start(self, rank: int, peer: int, buffer: torch.Tensor, *, sends: bool) -> Transferring:
        if not self.streams[rank]:
            self.met.wait()
        with self.lock:
            own = Transferring(sends, buffer)
            self.streams[rank].append(own)
            for one, other in zip(self.streams[rank], self.streams[peer], strict=False):
                if one.sends == other.sends:
                    break  # each waits for what stands behind the other
                if not one.done:
                    source, target = (one, other) if one.sends else (other, one)
                    target.buffer.copy_(source.buffer)
                    one.done = other.done = True
        return own


class Nccl:
    """In place of torch's ProcessGroupNCCL: a communicator for each pair of a group, made at its first transfer."""

    Options = type("Options", (), {})

    def __init__(self) -> None:
        self.communicators: dict[tuple[int, frozenset[int]], Communicator] = defaultdict(Communicator)
        self.groups: Counter[int] = Counter()
        self.lock = Lock()

    def __call__(self, _store: Any, rank: int, _size: int, _options: Any) -> Any:
        with self.lock:
            group = self.groups[rank]
            self.groups[rank] += 1
        nccl = self

        class Group:
            def send(self, tensors: list[torch.Tensor], peer: int, _tag: int) -> Transferring:
                return nccl.between(group, rank, peer).start(rank, peer, tensors[0], sends=True)

            def recv(self, tensors: list[torch.Tensor], peer: int, _tag: int) -> Transferring:
                return nccl.between(group, rank, peer).start(rank, peer, tensors[0], sends=False)

        return Group()

    def between(self, group: int, rank: int, peer: int) -> Communicator:
        with self.lock:
            return self.communicators[group, frozenset({rank, peer})]


def test_a_peer_that_does_not_answer_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise torch.distributed.DistError("gone")

    class Group:
        Options = Nccl.Options

        def __init__(self, *_: Any) -> None:
            pass

        def send(self, *_: Any) -> SimpleNamespace:
            return SimpleNamespace(is_completed=lambda: True, wait=lost)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    options: Any = {"device": torch.device("cpu"), "timeout_s": 1.0, "look": lambda: None}
    with pytest.raises(PeerError, match=r"^NCCL: the transfer with rank 1 failed: gone$"):
        NcclTransport(HashStore(), [0, 1], 0, to=[1], from_=[], **options)


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, list[int]]], dict[int, dict[int, int]]]:
    """Every rank receives from all that send to it, then sends, then waits, as in the first bucket of a sync."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl(), raising=False)

    def run(sends: dict[int, list[int]]) -> dict[int, dict[int, int]]:
        ranks = sorted({*sends, *(peer for peers in sends.values() for peer in peers)})
        store = HashStore()

        def rank(own: int) -> dict[int, int]:
            to, from_ = sends.get(own, []), [rank for rank, peers in sends.items() if own in peers]
            transport = NcclTransport(
                store,
                ranks,
                own,
                to=to,
                from_=from_,
                device=torch.device("cpu"),
                timeout_s=WAIT_S,
                look=lambda: None,
            )
            came = {peer: torch.zeros(1, dtype=torch.int64) for peer in from_}
            # In an order in which the first transfers of a ring of ranks wait for each other.
            transfers: list[Transfer] = [transport.receive(peer, 0, came[peer]) for peer in reversed(from_)]
            transfers += [transport.send(peer, 0, torch.tensor([100 * own + peer])) for peer in to]
            for transfer in transfers:
                transfer.wait("no number")
            return {peer: int(number) for peer, number in came.items()}

        with ThreadPoolExecutor(len(ranks)) as threads:
            return dict(zip(ranks, threads.map(rank, ranks), strict=True))

    return run


@pytest.mark.parametrize(
    "sends",
    [
        pytest.param({0: [1], 1: [0]}, id="each other"),
        pytest.param({0: [1], 1: [2], 2: [0]}, id="a ring"),
        pytest.param({0: [2], 2: [1], 1: [0]}, id="a ring the other way"),
        pytest.param({rank: [peer for peer in (1, 3, 4, 8) if peer != rank] for rank in (1, 3, 4, 8)}, id="all to all"),
    ],
)
def test_ranks_that_send_and_receive_do_not_deadlock(exchange: Any, sends: dict[int, list[int]]) -> None:
    expected: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, peers in sends.items():
        for peer in peers:
            expected[peer][rank] = 100 * rank + peer
    assert exchange(sends) == expected
