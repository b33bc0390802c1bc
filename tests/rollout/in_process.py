"""Functions that run in the engine's process, or in vLLM's workers."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.rollout.engine import RolloutEngine


def version(engine: RolloutEngine) -> int | None:
    return engine.version


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
        {f for pid in (os.getpid(), *workers) for f in _shared(pid)}
    )


def _modules(_worker: Any, package: str) -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == package]


def _pid(_worker: Any) -> int:
    return os.getpid()


def _shared(pid: int) -> set[str]:
    paths = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            paths.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {path for path in paths if path.startswith("/dev/shm/")}


def _raise_padding_rows(worker: Any) -> int:
    import torch

    head = worker.get_model().lm_head
    rows = head.weight.data[head.shard_indices.num_org_elements :]
    with torch.no_grad():
        rows.copy_(1000 * torch.sign(torch.randn(rows.shape)))
    head.quant_method.process_weights_after_loading(head)
    return len(rows)
