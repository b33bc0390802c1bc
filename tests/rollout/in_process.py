"""Functions that run in the engine's process, or in vLLM's workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.rollout.engine import RolloutEngine
from megarl.types import RolloutChunk, SampleInfo, SampleRequest, WorkItem
from tests.leftovers import open_shared_memory


def generate(
    engine: RolloutEngine, requests: Sequence[SampleRequest], sizes: Sequence[int], at_once: int = 100
) -> tuple[list[SampleInfo], list[RolloutChunk]]:
    """The answers to work items of these sizes, in their order."""
    answered = {infos[0].chunk: (infos, chunk) for infos, chunk in engine.generate(items(requests, sizes), at_once)}
    infos = [info for index in range(len(sizes)) for info in answered[index][0]]
    return infos, [answered[index][1] for index in range(len(sizes))]


def generate_in_turns(
    engine: RolloutEngine, requests: Sequence[SampleRequest], sizes: Sequence[int], at_once: int
) -> tuple[list[RolloutChunk], list[tuple[int, int]]]:
    """The chunks in the order in which they came; and after each, how many items were taken and how many had come."""
    taken = 0

    def queue() -> Iterator[WorkItem]:
        nonlocal taken
        for item in items(requests, sizes):
            taken += 1
            yield item

    chunks: list[RolloutChunk] = []
    progress: list[tuple[int, int]] = []
    for _, chunk in engine.generate(queue(), at_once):
        chunks.append(chunk)
        progress.append((taken, len(chunks)))
    return chunks, progress


def give_up(engine: RolloutEngine, requests: Sequence[SampleRequest], sizes: Sequence[int]) -> int:
    """Stops listening after the first answer; how many requests vLLM still has."""
    answers = engine.generate(items(requests, sizes), 100)
    next(answers)
    answers.close()
    return engine._llm.get_num_unfinished_requests()


def items(requests: Sequence[SampleRequest], sizes: Sequence[int]) -> Iterator[WorkItem]:
    left = iter(requests)
    for chunk, size in enumerate(sizes):
        yield WorkItem(chunk=chunk, requests=tuple(next(left) for _ in range(size)))


def version(engine: RolloutEngine) -> int | None:
    return engine.version


def free_bytes(_engine: RolloutEngine) -> int:
    """Of the GPU's memory."""
    import torch

    return torch.cuda.mem_get_info()[0]


def recv_buffer_bytes(_engine: RolloutEngine) -> int:
    """Of the memory in which weights arrive, what there is in this process."""
    files = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum(512 * file.stat().st_blocks for file in files if "megarl-recv" in os.path.realpath(file))


def loaded_modules(_engine: RolloutEngine, package: str) -> list[str]:
    """The modules of a package that the engine's process has imported."""
    return [name for name in sys.modules if name.split(".")[0] == package]


def workers_modules(engine: RolloutEngine, package: str) -> list[list[str]]:
    """The same, of every worker process."""
    return engine._llm.collective_rpc(_modules, args=(package,))


def disable_cache_reset(engine: RolloutEngine) -> None:
    engine._llm.reset_prefix_cache = lambda: True


def enable_cache_reset(engine: RolloutEngine) -> None:
    del engine._llm.reset_prefix_cache


def raise_padding_rows(engine: RolloutEngine) -> list[int]:
    """Makes the rows that pad the output layer produce huge logits; how many rows each rank has of them."""
    return engine._llm.collective_rpc(_raise_padding_rows)


def processes_and_shared_memory(engine: RolloutEngine) -> tuple[list[int], list[str]]:
    """The worker processes, and the shared memory that they or the engine have open."""
    workers = engine._llm.collective_rpc(_pid)
    return [pid for pid in workers if pid != os.getpid()], sorted(
        {f for pid in (os.getpid(), *workers) for f in open_shared_memory(pid)}
    )


def _modules(_worker: Any, package: str) -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == package]


def _pid(_worker: Any) -> int:
    return os.getpid()


def _raise_padding_rows(worker: Any) -> int:
    import torch

    head = worker.get_model().lm_head
    rows = head.weight.data[head.shard_indices.num_org_elements :]
    with torch.no_grad():
        rows.copy_(1000 * torch.sign(torch.randn(rows.shape)))
    head.quant_method.process_weights_after_loading(head)
    return len(rows)
