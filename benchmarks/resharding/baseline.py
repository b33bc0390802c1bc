"""The usual way: every rank materialises every whole HF tensor, and the engine's ranks load all of them.

Per bucket of 512 MiB: the ranks of the stage that has it gather their shards over tensor parallelism in one flattened
call, each passes the whole to the other stages in one broadcast, every rank brings it into HF's layout, and an
engine rank reads it where a trainer rank has written it, in memory that both have mapped. What does not depend on the
weights is made once: buffers, views, groups.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from benchmarks.resharding.model import ACTOR, FullBucket, Setup, full_buckets
from benchmarks.resharding.processes import Span

BUCKET_BYTES = 512 << 20


def store_of(port: int) -> Any:
    """Where trainers and engine ranks tell each other that a bucket is full or read."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def shared(path: str, nbytes: int) -> torch.Tensor:
    """Flat bytes that everybody sees who has opened the file."""
    with Path(path).open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)


def views(buffer: torch.Tensor, bucket: FullBucket, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The whole tensors of a bucket."""
    return {
        name: buffer[full.offset : full.offset + full.nbytes].view(dtype).view(full.shape)
        for name, full in bucket.tensors.items()
    }


class Gather:
    """A trainer rank's part.

    Args:
        setup: what is measured.
        rank: of the actor's layout.
        port: of the store at which all ranks of the baseline meet.
        paths: of the engine ranks' memory, to which as many trainer ranks write.
    """

    def __init__(self, setup: Setup, rank: int, port: int, paths: list[str]) -> None:
        self._rank, self._at = rank, ACTOR.coords(rank)
        self._store = store_of(port)
        dist.init_process_group("gloo", store=self._store, rank=rank, world_size=ACTOR.world_size)
        self._stages = [[tp + ACTOR.tp * pp for tp in range(ACTOR.tp)] for pp in range(ACTOR.pp)]
        self._tp_group = [dist.new_group(ranks) for ranks in self._stages][self._at.pp]
        self._pp_group = [dist.new_group(list(ranks)) for ranks in zip(*self._stages, strict=True)][self._at.tp]
        self._buckets = full_buckets(setup, BUCKET_BYTES)
        largest = max(bucket.nbytes for bucket in self._buckets)
        self._feeds = rank < len(paths)
        self._buffer = shared(paths[rank], largest) if self._feeds else torch.ones(largest, dtype=torch.uint8)
        shards = [self._shard_bytes(setup, bucket) for bucket in self._buckets]
        self._local = torch.ones(max(shards), dtype=torch.uint8)
        self._gathered = torch.ones(ACTOR.tp * max(shards), dtype=torch.uint8)
        self._parts = [self._gathered[: ACTOR.tp * nbytes].view(ACTOR.tp, nbytes) for nbytes in shards]
        self._copies = [self._conversion(setup, *pair) for pair in zip(self._buckets, self._parts, strict=True)]

    def run(self, params: dict[str, torch.Tensor], version: int) -> Span:
        """Gathers the whole model and hands it over; ends when the last bucket has been read."""
        span = Span(start=perf_counter())
        for i, bucket in enumerate(self._buckets):
            with span.stage("gather"):
                if bucket.stage == self._at.pp:
                    local = self._local[: self._parts[i].shape[1]]
                    torch.cat([params[name].view(-1).view(torch.uint8) for name in bucket.params], out=local)
                    dist.all_gather_single(self._parts[i].view(-1), local, group=self._tp_group)
                dist.broadcast(self._parts[i], self._stages[bucket.stage][self._at.tp], group=self._pp_group)
            with span.stage("wait"):
                if i and self._feeds:
                    self._store.wait([f"{version}/{i - 1}/read/{self._rank}"])
            with span.stage("convert"):
                for target, values in self._copies[i]:
                    target.copy_(values)
            if self._feeds:
                with span.stage("verify"):
                    digest = xxhash.xxh3_64_hexdigest(self._buffer[: bucket.nbytes].numpy())
                self._store.set(f"{version}/{i}/full/{self._rank}", digest)
        with span.stage("wait"):
            if self._feeds:
                self._store.wait([f"{version}/{len(self._buckets) - 1}/read/{self._rank}"])
        span.end = perf_counter()
        return span

    def _shard_bytes(self, setup: Setup, bucket: FullBucket) -> int:
        """Bytes of a bucket's parameters on one rank of their stage."""
        infos = setup.actor_map(self._stages[bucket.stage][0]).params
        return sum(infos[name].nbytes for name in bucket.params)

    def _conversion(
        self, setup: Setup, bucket: FullBucket, parts: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Boxes of the whole tensors, and where their values lie in what was gathered."""
        dtype: torch.dtype = getattr(torch, setup.dtype)
        whole = views(self._buffer, bucket, dtype)
        copies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # what several ranks hold is taken from one
        for tp, rank in enumerate(self._stages[bucket.stage]):
            shard_map, offset = setup.actor_map(rank), 0
            held: dict[str, torch.Tensor] = {}
            for name in bucket.params:
                info = shard_map.params[name]
                held[name] = parts[tp, offset : offset + info.nbytes].view(dtype).view(info.shape)
                offset += info.nbytes
            for shard in shard_map.shards:
                if shard.param in held:
                    target = whole[shard.name][shard.region.slices]
                    copies[f"{shard.name}{shard.region}"] = target, held[shard.param][shard.box.slices]
        return list(copies.values())


class Load:
    """An engine rank's part, in vLLM's worker: every whole tensor through vLLM's ``load_weights``.

    vLLM's own reload gives the packed layers their plain parameters back, and packs each when all of it has come.

    Args:
        worker: vLLM's.
        setup: what is measured.
        port: of the store.
        path: of the memory in which the buckets arrive.
    """

    def __init__(self, worker: Any, setup: Setup, port: int, path: str) -> None:
        self._worker = worker
        self._buckets = full_buckets(setup, BUCKET_BYTES)
        self._buffer = shared(path, max(bucket.nbytes for bucket in self._buckets))
        self._store = store_of(port)
        dtype: torch.dtype = getattr(torch, setup.dtype)
        self._views = [views(self._buffer, bucket, dtype) for bucket in self._buckets]

    def run(self, version: int) -> Span:
        """Loads the whole model as it comes."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model, rank = self._worker.get_model(), self._worker.rank
        span = Span(start=perf_counter())
        with span.stage("load"), torch.no_grad():
            initialize_layerwise_reload(model)
        for i, bucket in enumerate(self._buckets):
            with span.stage("wait"):
                digest = self._store.get(f"{version}/{i}/full/{rank}").decode()
            with span.stage("verify"):
                assert xxhash.xxh3_64_hexdigest(self._buffer[: bucket.nbytes].numpy()) == digest, "corrupt"
            with span.stage("load"), torch.no_grad():
                model.load_weights(iter(self._views[i].items()))
            self._store.set(f"{version}/{i}/read/{rank}", "")
        with span.stage("load"), torch.no_grad():
            finalize_layerwise_reload(model, self._worker.model_runner.model_config)
        span.end = perf_counter()
        return span
