"""A rank of the actor without its Megatron: the parameters that its shard map says, and what is done with them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import xxhash

from benchmarks.resharding.baseline import Gather
from benchmarks.resharding.model import MIB, Setup
from benchmarks.resharding.processes import Span, measure
from megarl.resharding import Sender, SyncSpec, connect


class Trainer:
    """Sends its parameters by our plan, or gathers all of them as the baseline does.

    Args:
        setup: what is measured.
        rank: of the actor's layout.
    """

    def __init__(self, setup: Setup, rank: int) -> None:
        torch.set_num_threads(1)
        self._setup, self._rank = setup, rank
        self._params = setup.values(rank, 0)
        self._senders: dict[str, Sender] = {}
        self._nbytes = 0
        self._halves = [torch.ones(int(setup.bucket_mib * MIB), dtype=torch.uint8) for _ in range(2)]
        self._gather: Gather | None = None

    def pid(self) -> int:
        return os.getpid()

    def fill(self, seed: int) -> None:
        """Gives every parameter other values, in place."""
        for name, values in self._setup.values(self._rank, seed).items():
            self._params[name].copy_(values)

    def connect(self, name: str, sync: SyncSpec) -> None:
        self._senders[name] = Sender(connect(sync, self._rank), self._params)
        self._nbytes = sync.sender(self._rank).nbytes

    def send(self, name: str, version: int) -> Span:
        span = measure(lambda: self._senders[name].send(version))
        span.seconds = span.value.seconds
        return span

    def memcpy(self) -> Span:
        """Copies as many bytes as it sends, once, to where ours puts them: two buckets of memory."""
        blocks = list(self._blocks())

        def copy() -> None:
            for i, block in enumerate(blocks):
                self._halves[i % 2][: block.numel()].copy_(block)

        return measure(copy)

    def checksums(self) -> Span:
        """Makes a checksum of as many bytes as it sends, bucket by bucket."""
        blocks = [block.numpy() for block in self._blocks()]
        return measure(lambda: [xxhash.xxh3_64_intdigest(block) for block in blocks])

    def join(self, port: int, paths: list[str]) -> None:
        """Joins the world of the baseline."""
        self._gather = Gather(self._setup, self._rank, port, paths)

    def gather(self, version: int) -> Span:
        """The baseline's part of a sync."""
        assert self._gather is not None, "join comes first"
        return self._gather.run(self._params, version)

    def _blocks(self) -> Iterator[torch.Tensor]:
        """The parameters' bytes, as many as are sent, in parts that fit into a bucket."""
        left = self._nbytes
        for tensor in self._params.values():
            for block in tensor.view(-1).view(torch.uint8).split(self._halves[0].numel()):
                yield block[:left]
                left -= min(left, block.numel())
                if not left:
                    return
