"""Refuses runs whose memory plan does not fit on the devices, and says what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config import ConfigError, Problem, RunConfig, on_first_nodes
from megarl.files import format_bytes
from megarl.models import model_spec
from megarl.preflight.capacity import capacity
from megarl.preflight.memory_plan import DevicePlan, PhaseMemory, plan_memory
from megarl.rollout.engine_memory import FILLED, PROCESS, sequence_bytes
from megarl.types import RoleName


def check_memory(config: RunConfig) -> None:
    """Raises ConfigError if what is certain to be needed at once exceeds a device, or all virtual ones this machine.

    And if the engines' fraction of a device leaves no room for their caches. The same holds on
    `cluster.min_nodes`.
    """
    plans = plan_memory(config)
    room = capacity(config)
    problems = list(_without_cache(config, plans))
    refused: set[str] = set()
    groups = [plans] if room.shared else [[plan] for plan in plans]
    for group in groups:
        by_phase: dict[str, list[tuple[DevicePlan, PhaseMemory]]] = {}
        for plan in group:
            for found in plan.phases():
                by_phase.setdefault(found.phase, []).append((plan, found))
        for phase, needed in by_phase.items():
            total = sum(found.exact for _, found in needed)
            if total <= room.nbytes or phase in refused:
                continue
            refused.add(phase)
            plan, largest = max(needed, key=lambda pair: pair[1].exact)
            devices = ", ".join(str(plan.device) for plan, _ in needed)
            rule = f"{phase} must fit into {format_bytes(room.nbytes)} ({room.source})"
            fix = advice(config, plan, largest, excess=total - room.nbytes)
            problems.append(Problem(f"memory of device {devices}", format_bytes(total), rule, fix))
    if problems:
        raise ConfigError(problems)
    if (least := config.cluster.min_nodes) is not None:
        try:
            check_memory(on_first_nodes(config, least))
        except ConfigError as error:
            rule = f"the run must fit on its first {least} nodes; there, it breaks:\n{error.problems[0]}"
            fix = "raise it, or set it to null"
            raise ConfigError([Problem("cluster.min_nodes", str(least), rule, fix)]) from None


def _without_cache(config: RunConfig, plans: Sequence[DevicePlan]) -> Iterator[Problem]:
    rollout = config.engine_settings
    fullest: DevicePlan | None = None
    for plan in plans:
        if plan.engine is None or plan.engine.cache > 0:
            continue
        if fullest is None or plan.besides_cache > fullest.besides_cache:
            fullest = plan
    if rollout is None or fullest is None:
        return
    engine = fullest.engine
    assert engine is not None
    room = capacity(config)
    if rollout.gpu_memory_fraction is None:
        taken = fullest.besides_cache
        phase = next(found for found in fullest.phases() if found.peak == taken)
        needed = taken + sequence_bytes(model_spec(config.model.hf_config()), rollout)
        rule = f"in {phase.phase}, the cache of one sequence must fit beside {format_bytes(taken)} into "
        rule += f"{FILLED:.0%} of {format_bytes(room.nbytes)} ({room.source})"
        excess = needed - int(FILLED * room.nbytes)
        fix = advice(config, fullest, phase, excess=excess)
        yield Problem("rollout.kv_cache_mib", "null", rule, fix)
    else:
        taken = engine.weights + engine.kept + engine.work + PROCESS
        device = room.device_bytes
        rule = f"more than what an engine takes besides its cache, {format_bytes(taken)} of {format_bytes(device)}"
        fix = f"set it above {taken / device:.2f}, or raise rollout.tp"
        given = f"{rollout.gpu_memory_fraction:g}"
        yield Problem("rollout.gpu_memory_fraction", given, rule, fix)


def advice(config: RunConfig, plan: DevicePlan, phase: PhaseMemory, excess: int) -> str:
    """Returns the first setting that frees the excess of a phase, or else several, largest first."""
    remedies = [remedy for remedy in _remedies(config, plan, phase) if remedy[0] > 0]
    for freed, setting in remedies:
        if freed >= excess:
            return setting
    settings: list[str] = []
    for freed, setting in sorted(remedies, reverse=True):
        if excess > 0:
            settings.append(setting)
            excess -= freed
    return ", and ".join(settings) or "take machines with more memory, or a smaller model"


def _remedies(config: RunConfig, plan: DevicePlan, phase: PhaseMemory) -> Iterator[tuple[int, str]]:
    """Yields the bytes that a setting would free, roughly, and the setting, the cheapest first.

    Virtual devices share their machine: there nothing can be offloaded, slept away or split.
    """
    engine = plan.engine
    role = phase.role
    field = "" if role is None else _field(config, plan.roles[role].spec.name)
    on_gpu = plan.kind == "cuda"
    if on_gpu and engine is not None and not plan.sleeps and plan.roles and phase.phase != "generate":
        freed = phase.cache + engine.work
        if phase.phase != "sync":
            freed += phase.weights
        yield freed, "set rollout.sleep=true"
    elif engine is not None:
        yield phase.cache, f"lower {plan.cache_field}"
    if plan.saved:
        yield phase.snapshot, "set checkpoint.async_save=false"
    for name, memory in plan.roles.items():
        if on_gpu and not memory.spec.offload and name != role:
            yield memory.state, f"set {_field(config, memory.spec.name)}.offload=true"
    if role is not None and phase.phase == "update" and plan.roles[role].spec.recompute != "full":
        yield phase.activations, f"set {field}.recompute=full, or lower its tokens_per_micro_batch"
    elif role is not None:
        yield phase.activations // 2, f"lower {field}.tokens_per_micro_batch"
    if on_gpu and engine is not None:
        yield phase.weights // 2, f"raise {plan.cache_field.rpartition('.')[0]}.tp"
    if on_gpu and role is not None:
        state = phase.parameters + phase.gradients + phase.optimizer + phase.stepping
        yield state // 2, f"raise {field}.tp or pp, with more devices in its group"


def _field(config: RunConfig, role: RoleName) -> str:
    return f"groups.{config.group_of(role)}.roles.{role}"
