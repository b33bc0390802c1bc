"""Refuses runs whose memory plan does not fit on the devices, and says what would help."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config import ConfigError, Problem, RunConfig
from megarl.files import format_bytes
from megarl.preflight.memory_plan import DevicePlan, PhaseMemory, plan_memory

_GIB = 1 << 30
_LARGEST = 268 * _GIB
"""Memory of the largest GPU, a B300."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The memory of a device; ``shared`` by all devices where these are virtual."""

    nbytes: int
    source: str
    shared: bool = False


def capacity(config: RunConfig) -> Capacity:
    """Returns the memory of a device: as configured, of this machine's, or else of the largest GPU there is."""
    cluster = config.cluster
    shared = cluster.device == "cpu"
    if cluster.device_memory_gib is not None:
        nbytes = int(cluster.device_memory_gib * _GIB)
        return Capacity(nbytes=nbytes, source="cluster.device_memory_gib", shared=shared)
    if shared:
        machines = 1 if cluster.address is None else cluster.nodes
        nbytes = machines * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Capacity(nbytes=nbytes, source="this machine" if machines == 1 else "machines like this", shared=True)
    gpu = _first_gpu() if cluster.address is None else None
    return gpu or Capacity(nbytes=_LARGEST, source="the largest GPU there is; set cluster.device_memory_gib")


def _first_gpu() -> Capacity | None:
    """Returns the first GPU of this machine; asks without torch, which would start CUDA."""
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        mib, name = answer.strip().split(", ", 1)
        return Capacity(nbytes=int(mib) << 20, source=name)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def check_memory(config: RunConfig) -> None:
    """Raises ConfigError if what is certain to be needed at once exceeds a device, or all virtual ones this machine."""
    plans, room = plan_memory(config), capacity(config)
    problems: dict[str, Problem] = {}
    for group in [plans] if room.shared else [[plan] for plan in plans]:
        by_phase: dict[str, list[tuple[DevicePlan, PhaseMemory]]] = {}
        for plan in group:
            for found in plan.phases():
                by_phase.setdefault(found.phase, []).append((plan, found))
        for phase, needed in by_phase.items():
            total = sum(found.exact for _, found in needed)
            if total > room.nbytes and phase not in problems:
                largest = max(needed, key=lambda pair: pair[1].exact)
                names = ", ".join(str(plan.device) for plan, _ in needed)
                rule = f"{phase} fits into {format_bytes(room.nbytes)} ({room.source})"
                fix = advice(config, *largest)
                problems[phase] = Problem(f"memory of device {names}", format_bytes(total), rule, fix)
    if problems:
        raise ConfigError(list(problems.values()))


def advice(config: RunConfig, plan: DevicePlan, phase: PhaseMemory) -> str:
    """Returns the setting that would free most memory of a phase."""
    return max(_remedies(config, plan, phase))[1]


def _remedies(config: RunConfig, plan: DevicePlan, phase: PhaseMemory) -> Iterator[tuple[int, str]]:
    """Yields the bytes that a setting would free, roughly, and the setting."""
    engine, role = plan.engine, phase.role
    if engine is not None and not plan.sleeps and plan.roles and phase.phase in ("inference", "update", "checkpoint"):
        yield engine.weights + engine.cache, "set rollout.sleep=true"
    yield phase.cache, "lower rollout.kv_cache_mib"
    yield phase.weights // 2, "raise rollout.tp"
    for name, memory in plan.roles.items():
        if not memory.spec.offload and name != role:
            yield memory.state, f"set groups.{config.group_of(name)}.roles.{name}.offload=true"
    if role is not None:
        field, spec = f"groups.{config.group_of(role)}.roles.{role}", plan.roles[role].spec
        if phase.phase == "update" and spec.recompute != "full":
            yield phase.activations, f"set {field}.recompute=full, or lower its tokens_per_micro_batch"
        yield phase.activations // 2, f"lower {field}.tokens_per_micro_batch"
        state = phase.parameters + phase.gradients + phase.optimizer + phase.stepping
        yield state // 2, f"raise {field}.tp or pp, with more devices in its group"
