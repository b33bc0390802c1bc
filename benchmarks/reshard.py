"""A sync of 248 million parameters from TP2 x PP2 to a vLLM engine at TP2, against the usual way and the floors.

    python -m benchmarks.reshard [--dtype float32] [--bucket-mib 64] [--repetitions 5] [--layers 16]

Processes are real: four trainer ranks, and vLLM with two ranks of its own. The trainers hold synthetic parameters by
the shard maps of the layout, and no Megatron. Every repetition does all of it, one after the other:

- ours: shards by the plan, once into memory from which nothing is loaded, without and with checksums, by shared memory
  and by Gloo, and once as in a run, into vLLM's layers;
- the baseline (``resharding/baseline.py``): every whole tensor on every rank, 512 MiB at a time, and ``load_weights``;
- the floors: a memcpy of the bytes that are sent, by the ranks that send them; checksums of the same bytes by those who
  send and those who receive; and vLLM's own packing of the layers.

A time is from the first rank's beginning to the last one's end. The table has medians; ratios are medians of the
ratios within a repetition. Memory is measured from outside while one more sync connects and runs, and is what ranks
take beyond their parameters and vLLM's; it is counted, too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.resharding.baseline import BUCKET_BYTES
from benchmarks.resharding.engine import Engine
from benchmarks.resharding.memory import Watch
from benchmarks.resharding.model import ENGINE_TP, ENGINES, MIB, TRAINERS, Setup, full_buckets
from benchmarks.resharding.processes import Process, Span, call_all, elapsed
from benchmarks.resharding.trainer import Trainer
from megarl.resharding import SyncSpec, serve_store
from megarl.weights.planner import Place

Times = dict[str, float]


class Benchmark:
    """All processes, connected.

    Args:
        setup: what is measured.
        directory: for the memory that the baseline's processes share; on a file system in memory.
    """

    def __init__(self, setup: Setup, directory: str) -> None:
        self._plan = setup.plan()
        self.nbytes = self._plan.nbytes
        self._store, self._baseline_store = serve_store(), serve_store()
        self._trainers = [Process(Trainer, setup, rank) for rank in TRAINERS]
        self._engine = Process(Engine, setup)
        self._pids = [*call_all(self._trainers, "pid"), *self._engine.call("pids")]
        self._version = 0
        paths = [str(Path(directory, f"engine-rank-{rank}")) for rank in range(ENGINE_TP)]
        largest = max(bucket.nbytes for bucket in full_buckets(setup, BUCKET_BYTES))
        for path in paths:
            Path(path).write_bytes(bytes(largest))
        self._engine.begin("join", self._baseline_store.port, paths)
        call_all(self._trainers, "join", self._baseline_store.port, paths)
        self._engine.end()
        self.memory, self.counted = self._connect()

    def close(self) -> None:
        for process in (*self._trainers, self._engine):
            process.close()

    def repetition(self) -> Times:
        """Everything once."""
        times = {"memcpy": elapsed(call_all(self._trainers, "memcpy"))}
        times["checksums"] = self._checksums()
        times["packing"] = max(span.seconds["packing"] for span in self._engine.call("packing"))
        times["moved"] = self._without_load("moved")
        times["verified"] = self._without_load("verified")
        times["verified, by Gloo"] = self._without_load("gloo")
        times |= self._ours() | self._baseline()
        return times

    def check(self) -> None:
        """Both ways bring the same weights, and other ones than before."""
        answers = []
        for seed, way in ((1, self._ours), (2, self._baseline), (2, self._ours)):
            call_all(self._trainers, "fill", seed)
            way()
            answers.append(self._engine.call("probe"))
        assert answers[0] != answers[1], "the baseline has changed nothing"
        assert answers[1] == answers[2], "ours and the baseline's weights differ"

    def _spec(self, name: str) -> SyncSpec:
        return SyncSpec.of(
            self._plan,
            name=name,
            host="127.0.0.1",
            port=self._store.port,
            places=[Place() for _ in (*TRAINERS, *ENGINES)],
            transport="gloo" if name == "gloo" else "auto",
            verify=name != "moved",
        )

    def _connect(self) -> tuple[list[int], int]:
        """Makes all connections; bytes that one and its first sync take per rank, and the most that a rank counts."""
        for name in ("moved", "gloo", "whole"):
            self._begin_connect(name)
            self._end_connect()
        watch = Watch(self._pids)
        self._begin_connect("verified")
        self._end_connect()
        self._version += 1
        self._engine.begin("receive_without_load", "verified", self._version)
        spans = call_all(self._trainers, "send", "verified", self._version)
        spans += self._engine.end()
        return list(watch.stop().values()), max(span.value.peak_staging_bytes for span in spans)

    def _begin_connect(self, name: str) -> None:
        spec = self._spec(name)
        if name == "whole":
            self._engine.begin("connect", spec)
        else:
            self._engine.begin("connect_without_load", name, spec)
        for rank, trainer in enumerate(self._trainers):
            trainer.begin("connect", name, spec.only([rank]))

    def _end_connect(self) -> None:
        for process in (self._engine, *self._trainers):
            process.end()

    def _checksums(self) -> float:
        self._engine.begin("checksums")
        spans = call_all(self._trainers, "checksums")
        return max(elapsed(spans), elapsed(self._engine.end()))

    def _without_load(self, name: str) -> float:
        self._version += 1
        self._engine.begin("receive_without_load", name, self._version)
        spans = call_all(self._trainers, "send", name, self._version)
        return elapsed([*spans, *self._engine.end()])

    def _ours(self) -> Times:
        self._version += 1
        self._engine.begin("receive", self._version)
        sent: list[Span] = call_all(self._trainers, "send", "whole", self._version)
        received: Span = self._engine.end()
        stages = {f"ours: {stage}": seconds for stage, seconds in received.seconds.items()}
        return {"ours": elapsed([*sent, received]), **stages}

    def _baseline(self) -> Times:
        self._version += 1
        self._engine.begin("load", self._version)
        gathered: list[Span] = call_all(self._trainers, "gather", self._version)
        loaded: list[Span] = self._engine.end()
        stages = {}
        for spans, side in ((gathered, "trainer"), (loaded, "engine")):
            for stage in dict.fromkeys(stage for span in spans for stage in span.seconds):
                stages[f"baseline: {side} {stage}"] = max(span.seconds.get(stage, 0.0) for span in spans)
        return {"baseline": elapsed([*gathered, *loaded]), **stages}


def ratios(times: Times) -> Times:
    """What the aims are about."""
    floors = times["memcpy"] + times["checksums"] + times["packing"]
    before = times["ours"] - times["ours: packing"]
    return {
        "pack and transfer / memcpy": times["moved"] / times["memcpy"],
        "with checksums / memcpy and checksums": times["verified"] / (times["memcpy"] + times["checksums"]),
        "whole / sum of the floors": times["ours"] / floors,
        "baseline / ours, whole": times["baseline"] / times["ours"],
        "baseline / ours, before vLLM's packing": (times["baseline"] - times["baseline: engine packing"]) / before,
    }


def report(setup: Setup, benchmark: Benchmark, repetitions: list[Times]) -> None:
    gb = benchmark.nbytes / 1e9
    print(f"{gb:.3f} GB of {setup.dtype}, buckets of {setup.bucket_mib:g} MiB, {len(repetitions)} repetitions: medians")
    for name in repetitions[0]:
        seconds = median(times[name] for times in repetitions)
        print(f"  {name:32} {seconds:8.3f} s" + ("" if ":" in name else f" {gb / seconds:8.2f} GB/s"))
    for name in ratios(repetitions[0]):
        values = sorted(ratios(times)[name] for times in repetitions)
        print(f"  {name:44} {median(values):6.2f}  ({values[0]:.2f} to {values[-1]:.2f})")
    measured = ", ".join(f"{nbytes / MIB:.0f}" for nbytes in benchmark.memory)
    print(f"  extra memory by rank, MiB: {measured} measured, {benchmark.counted / MIB:.1f} counted at most")
    print(f"  two buckets are {2 * setup.bucket_mib:g} MiB")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args(arguments)
    setup = Setup(dtype=options.dtype, bucket_mib=options.bucket_mib, layers=options.layers)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        benchmark = Benchmark(setup, directory)
        try:
            benchmark.check()
            report(setup, benchmark, [benchmark.repetition() for _ in range(options.repetitions)])
        finally:
            benchmark.close()


if __name__ == "__main__":
    main(sys.argv[1:])
