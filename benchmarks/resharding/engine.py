"""The engine: vLLM with two ranks in processes of their own, and what the benchmark does in those.

Functions here take vLLM's worker, and are called in it by vLLM's ``collective_rpc``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch
import xxhash

from benchmarks.resharding.baseline import Load
from benchmarks.resharding.model import ENGINE_TP, ENGINES, Setup
from benchmarks.resharding.processes import Span, measure
from megarl.config.schema import Rollout
from megarl.resharding import ConnectRequest, Receiver, SyncSpec, connect
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.engine_options import EngineOptions

PROBE = [list(range(2, 60)), list(range(900, 1000))]


class Engine:
    """A rollout engine, in this process.

    Args:
        setup: what is measured.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._directory = tempfile.TemporaryDirectory()
        Path(self._directory.name, "config.json").write_text(json.dumps(setup.config))
        rollout = Rollout(
            devices=f"0-{ENGINE_TP - 1}", tp=ENGINE_TP, max_new_tokens=8, max_model_len=128, kv_cache_mib=64
        )
        vocab = setup.spec.dims.vocab
        self._engine = RolloutEngine(
            self._directory.name, rollout, EngineOptions(vocab_size=vocab, device="cpu"), engine_id=0
        )
        self._engine.start()
        self._workers(_prepare, setup)

    def pids(self) -> list[int]:
        return self._workers(_pid)

    def connect(self, sync: SyncSpec) -> None:
        """As in a run."""
        self._engine.connect(ConnectRequest(sync=sync.only(ENGINES), ranks=ENGINES))

    def receive(self, version: int) -> Span:
        """As in a run: into vLLM's layers, prefix cache and version included."""
        self._workers(_reset_packing)
        span = measure(lambda: self._engine.receive_weights(version))
        span.seconds = _most([stats.seconds for stats in span.value])
        span.seconds["packing"] = max(self._workers(_packing))
        return span

    def connect_without_load(self, name: str, sync: SyncSpec) -> None:
        self._workers(_connect_without_load, name, sync.only(ENGINES))

    def receive_without_load(self, name: str, version: int) -> list[Span]:
        return self._workers(_receive_without_load, name, version)

    def checksums(self) -> list[Span]:
        return self._workers(_checksums)

    def packing(self) -> list[Span]:
        return self._workers(_pack_all)

    def join(self, port: int, paths: list[str]) -> None:
        """Prepares the baseline."""
        self._workers(_join, self._setup, port, paths)

    def load(self, version: int) -> list[Span]:
        """The baseline's part of a sync."""
        return self._workers(_load, version)

    def probe(self) -> list[float]:
        """Log-probabilities of some sequences with the weights as they are."""
        return self._engine.logprobs(PROBE).values.tolist()

    def close(self) -> None:
        self._engine.close()
        self._directory.cleanup()

    def _workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._engine._llm.collective_rpc(function, args=args)


def _most(parts: list[dict[str, float]]) -> dict[str, float]:
    """By stage, the seconds of whoever spent the most."""
    return {stage: max(part.get(stage, 0.0) for part in parts) for stage in dict.fromkeys(s for p in parts for s in p)}


class _Bench:
    """What the benchmark keeps in a worker.

    Args:
        packing: CPU seconds that vLLM spent in packing layers; its threads are one.
    """

    def __init__(self, worker: Any, setup: Setup) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        self.packing = 0.0
        self.receivers: dict[str, Receiver] = {}
        self.load: Load | None = None
        self.shard_map = setup.spec.vllm_map(ENGINE_TP, worker.rank)
        for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            self._time(method)

    def _time(self, method: Any) -> None:
        process = method.process_weights_after_loading

        def timed(this: Any, layer: torch.nn.Module) -> None:
            start = thread_time()
            process(this, layer)
            self.packing += thread_time() - start

        method.process_weights_after_loading = timed


def _prepare(worker: Any, setup: Setup) -> None:
    worker.bench = _Bench(worker, setup)


def _pid(_worker: Any) -> int:
    return os.getpid()


def _reset_packing(worker: Any) -> None:
    worker.bench.packing = 0.0


def _packing(worker: Any) -> float:
    return worker.bench.packing


def _connect_without_load(worker: Any, name: str, sync: SyncSpec) -> None:
    worker.bench.receivers[name] = Receiver(connect(sync, ENGINES[worker.rank]), lambda *_: None)


def _receive_without_load(worker: Any, name: str, version: int) -> Span:
    span = measure(lambda: worker.bench.receivers[name].receive(version))
    span.seconds = span.value.seconds
    return span


def _checksums(worker: Any) -> Span:
    """Makes a checksum of as many bytes as the rank receives."""
    blocks = [torch.ones(info.nbytes, dtype=torch.uint8).numpy() for info in worker.bench.shard_map.params.values()]
    return measure(lambda: [xxhash.xxh3_64_intdigest(block) for block in blocks])


def _pack_all(worker: Any) -> Span:
    """Lets vLLM pack every layer; the weights are random afterwards."""
    infos, modules = worker.bench.shard_map.params, dict(worker.get_model().named_modules())
    span = Span(start=perf_counter())
    for name, module in modules.items():
        if hasattr(module, "quant_method") and f"{name}.weight" in infos:
            info = infos[f"{name}.weight"]
            values = torch.rand(info.shape).to(getattr(torch, info.dtype))
            module.weight = torch.nn.Parameter(values, requires_grad=False)
            with span.stage("packing"):
                module.quant_method.process_weights_after_loading(module)
    span.end = perf_counter()
    return span


def _join(worker: Any, setup: Setup, port: int, paths: list[str]) -> None:
    worker.bench.load = Load(worker, setup, port, paths[worker.rank])


def _load(worker: Any, version: int) -> Span:
    worker.bench.packing = 0.0
    span = worker.bench.load.run(version)
    span.seconds["packing"] = worker.bench.packing
    return span
