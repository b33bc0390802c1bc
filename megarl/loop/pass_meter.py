"""Tokens, operations and speed of the roles' passes over the samples of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from megarl.cluster.process_usage import ProcessUsage, memory_metrics
from megarl.config import RunConfig
from megarl.models import ModelSpec, model_spec
from megarl.models.flops import TokenCounts, forward_flops, peak_tflops
from megarl.run.sinks import Metrics
from megarl.types import HEADS, RoleName, Schedule
from megarl.weights.hf_files import read_config


@dataclass(kw_only=True)
class _Pass:
    """Passes of a role on some devices; the seconds are those of the slowest rank."""

    devices: int
    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0

    def metrics(self, name: str, peak: float | None) -> dict[str, float]:
        tflops_per_device = self.flops / 1e12 / self.seconds / self.devices
        metrics = {
            f"perf/tokens/{name}": self.tokens,
            f"perf/tflop/{name}": self.flops / 1e12,
            f"perf/tokens_per_second/{name}": self.tokens / self.seconds,
            f"perf/tflops_per_device/{name}": tflops_per_device,
        }
        if peak is not None:
            metrics[f"perf/mfu/{name}"] = tflops_per_device / peak
        return metrics


class PassMeter:
    """Adds up the passes of a step by name."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._passes: dict[str, _Pass] = {}
        self._spec = cache(self._read_spec)

    def add(
        self, name: str, role: RoleName, sequences: Iterable[TokenCounts], seconds: float, *, backward: bool = False
    ) -> None:
        """Counts a pass of a role over sequences, which a backward pass may have followed."""
        counted = list(sequences)
        flops = 0
        for teacher in {sequence.teacher for sequence in counted}:
            taught = [sequence for sequence in counted if sequence.teacher == teacher]
            flops += forward_flops(self._spec(role, teacher), HEADS[role], taught)
        if backward:
            flops *= 3
        total = self._passes.setdefault(name, _Pass(devices=self._config.layout(role).world_size))
        total.tokens += sum(sequence.tokens for sequence in counted)
        total.flops += flops
        total.seconds += seconds

    def add_update(self, role: RoleName, schedules: Iterable[Schedule], seconds: float) -> None:
        """Counts optimizer steps of a role."""
        rows: list[TokenCounts] = []
        for schedule in schedules:
            for rank in schedule.ranks:
                rows += itertools.chain.from_iterable(rank.packs)
        self.add(f"{role}_update", role, rows, seconds, backward=True)

    def take(self, usages: Mapping[str, Sequence[ProcessUsage]]) -> Metrics:
        """Pops the metrics of the passes, with those of the groups' processes."""
        peaks: set[float | None] = set()
        for usage in itertools.chain.from_iterable(usages.values()):
            peaks.add(self._config.cluster.peak_tflops or peak_tflops(usage.device_name))
        peak = peaks.pop() if len(peaks) == 1 else None
        metrics: dict[str, float] = {}
        for name, counted in self._passes.items():
            metrics |= counted.metrics(name, peak)
        self._passes = {}
        for group, processes in usages.items():
            metrics[f"perf/idle/{group}"] = sum(usage.idle for usage in processes) / len(processes)
            metrics |= memory_metrics(group, processes)
        return metrics

    def _read_spec(self, role: RoleName, teacher: str) -> ModelSpec:
        checkpoint = self._config.role_checkpoint(role)
        if teacher:
            checkpoint = self._config.teachers[teacher]
        return model_spec(self._config.model.hf_config() if checkpoint is None else read_config(checkpoint))
