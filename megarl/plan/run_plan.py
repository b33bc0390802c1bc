"""The plan of a run, printed before it starts: placement, layouts, batch arithmetic, algorithm, and memory."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megarl.cluster.cpu_threads import with_threads
from megarl.config import RunConfig, SamplingConfig, TrainingConfig
from megarl.config.schema import CheckpointSettings, Cluster, Optimizer, Threads
from megarl.files import format_bytes
from megarl.models import model_spec
from megarl.models.lora import adaptable, adapter_tensors
from megarl.models.transformer_engine import refusals
from megarl.preflight.capacity import capacity
from megarl.preflight.device_memory import advice
from megarl.preflight.memory_plan import PhaseMemory, plan_memory
from megarl.preflight.models import without_weights
from megarl.preflight.plan_text import every_steps
from megarl.role_specs import adapters_of
from megarl.rollout.engine_memory import fills_device
from megarl.run.resume import resumed_config
from megarl.texts import counted
from megarl.types import HEADS
from megarl.weights.hf_files import read_config

if TYPE_CHECKING:
    from megarl.preflight.datasets import Sets

_PLACEMENT = ("role", "group", "devices", "TP", "PP", "VPP", "DP", "EP", "SP", "tokens/micro-batch")
_KEY_WIDTH = 14
_SHOWN = 300
"""Characters of the first prompt's start and end; a shorter one is shown whole."""
_MEMORY_ROWS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits and output head",
    "stepping": "optimizer temporaries",
    "weights": "engine's weights",
    "cache": "KV cache",
    "engine": "engine workspace and CUDA graphs",
    "buckets": "buckets",
    "snapshot": "checkpoint's copy",
    "process": "processes",
    "nccl": "NCCL's buffers",
    "peak": "peak",
    "offloaded": "on the host",
}
_FAULTS = {"too_long": "too long", "empty": "empty", "equal": "with equal responses"}


def print_plan(
    config: RunConfig,
    sets: Sets,
    resume: str | None = None,
    console: Console | None = None,
    first_prompt: Sequence[int] = (),
) -> None:
    """Prints the placement of the roles, and the plan's lines.

    Args:
        resume: text about where the run in run.dir continues.
        first_prompt: ids of the environment's first prompt; without them, the first row's.
    """
    out = console or Console(highlight=False)
    table = Table(*_PLACEMENT, box=None)
    for row in _placement_rows(config):
        table.add_row(*row)
    out.print(table)
    lines = list(plan_lines(config, sets, first_prompt))
    if resume is not None:
        lines.append(("resume", resume))
    for key, text in lines:
        out.print(f"{key:{_KEY_WIDTH}}{text}", soft_wrap=True, markup=False)


def _placement_rows(config: RunConfig) -> Iterator[tuple[str, ...]]:
    for name, group in config.groups.items():
        for role, settings in group.roles.items():
            layout = config.layout(role)
            sizes = map(str, (layout.tp, layout.pp, layout.vpp, layout.dp, layout.ep))
            sequence = "yes" if layout.sequence_parallel else "no"
            budget = str(settings.tokens_per_micro_batch)
            yield (role, name, group.devices, *sizes, sequence, budget)
    engines = {"rollout": config.engine_settings}
    if config.judge_model is not None:
        engines["judge"] = config.judge_model.rollout
    for name, rollout in engines.items():
        if rollout is not None:
            yield (name, "", rollout.devices, str(rollout.tp), "", "", str(rollout.engines), "", "", "")


def plan_lines(config: RunConfig, sets: Sets, first_prompt: Sequence[int] = ()) -> Iterator[tuple[str, str]]:
    """Yields the work of a run as (key, text)."""
    rows = _row_texts(sets)
    yield "devices", _devices(with_threads(config, resumed_config(config)).cluster)
    if config.model.random is not None:
        yield "model", f"random, seed {config.model.random.seed}"
    else:
        yield "model", f"{config.model.path}"
    if config.cluster.device == "cuda":
        yield "layers", _layers(config)
    for field, path in without_weights(config).items():
        yield "not checked", f"the weights of {field}: {path} has a config.json, and none yet"
    yield from config.plan_lines(rows, len(sets.rows.get(config.rows_field, ())))
    if isinstance(config, SamplingConfig) and config.environment is not None:
        environment = config.environment
        rollout = config.rollout
        turns = f"up to {counted(environment.max_turns, 'turn')} of up to {rollout.max_new_tokens} tokens"
        yield "environment", f"{environment.name}, {turns}, {rollout.max_model_len} in all"
    first = _first_prompt(sets, first_prompt)
    if first is not None:
        yield "first prompt", first
    if not isinstance(config, TrainingConfig):
        yield "run", f"seed {config.run.seed}, into {config.run.dir}"
        return
    for role in config.trained:
        if config.has_role(role):
            schedule = _schedule(config.optimizer(role), config.optimizer_steps(role))
            yield "learning rate", f"{role}: {schedule}"
    yield "checkpoints", _checkpoints(config.checkpoint)
    yield "run", f"{counted(config.steps, 'step')}, seed {config.run.seed}, into {config.run.dir}"


def _adapters(config: TrainingConfig) -> Iterator[str]:
    """Yields a text about the adapters of each trained role, and what follows for the reference."""
    for role in config.trained:
        lora = config.lora(role)
        if lora is None or not config.has_role(role):
            continue
        checkpoint = config.role_checkpoint(role)
        spec = model_spec(
            config.model.hf_config() if checkpoint is None else read_config(checkpoint),
        )
        trained = adapter_tensors(spec, adapters_of(lora))
        targets = lora.targets if lora.targets != "all-linear" else sorted(adaptable(spec))
        counts: list[str] = []
        for tensors in (trained, spec.canonical(HEADS[role])):
            counts.append(f"{sum(math.prod(info.shape) for info in tensors.values()):,}")
        text = f"{role}: rank {lora.rank}, scale {lora.scale:g}, of {', '.join(targets)}"
        yield f"{text}; {counts[0]} parameters beside {counts[1]}, which stay"
    if config.actor_has_adapters and config.has_role("reference") and config.role_checkpoint("reference") is None:
        if not config.teachers:
            yield "the reference is the actor without them, and takes no memory"


def _layers(config: RunConfig) -> str:
    """Returns which layers the run's model has on a GPU that Transformer Engine supports."""
    spec = model_spec(config.model.hf_config())
    reasons = refusals(spec.dims, spec.table.kinds, spec.dtype)
    if config.actor_has_adapters:
        reasons.append("adapters are not supported in Transformer Engine's")
    if config.model.layers == "local" or reasons:
        return "; ".join(["Megatron's own", *reasons])
    return "Transformer Engine's, where it is installed"


def _checkpoints(settings: CheckpointSettings) -> str:
    if settings.every is None:
        return "after the last step"
    text = f"{every_steps(settings.every)}, {settings.keep} kept"
    if settings.keep_every is not None:
        text += f", and those of every {settings.keep_every} steps"
    if settings.best is not None:
        text += f", and that with the {settings.best.mode} of {settings.best.metric}"
    if settings.async_save:
        text += "; written during training"
    return text


def _devices(cluster: Cluster) -> str:
    if cluster.device == "cuda":
        text = counted(cluster.devices_per_node, "GPU")
    else:
        text = f"{counted(cluster.devices_per_node, 'virtual device')} of the CPU"
        threads = cluster.threads_per_device
        if threads != Threads():
            text += f"; threads: {threads.trainers} of each trainer rank, "
            text += f"{threads.engines} of each engine rank"
    if cluster.nodes > 1:
        text += f" on each of {counted(cluster.nodes, 'node')}"
    if not cluster.is_here:
        text += ", as configured: the cluster was not looked at"
    return text


def _first_prompt(sets: Sets, given: Sequence[int]) -> str | None:
    """Returns the first prompt as the model sees it, with special tokens; None without a tokenizer."""
    rows = next(filter(None, sets.rows.values()), None)
    if sets.tokenizer is None or not rows:
        return None
    row: Any = rows[0]
    if given:
        ids = given
    elif hasattr(row, "token_ids"):
        ids = row.token_ids
    else:
        ids = row.prompt_ids.tolist()
    text = sets.tokenizer.decode(ids, special=True)
    if len(text) > 3 * _SHOWN:
        middle = f" ... {len(text) - 2 * _SHOWN} characters ... "
        text = f"{text[:_SHOWN]}{middle}{text[-_SHOWN:]}"
    return f"{counted(len(ids), 'token')}: {json.dumps(text, ensure_ascii=False)}"


def _row_texts(sets: Sets) -> Mapping[str, str]:
    """Returns, by field, how many rows of each source were read, and why some were dropped."""
    texts: dict[str, str] = {}
    for field, rows in sets.rows.items():
        used = len(rows)
        faults = Counter(_FAULTS[row.fault] for source, row in sets.left_out.rows if source == field)
        dropped = faults.total()
        texts[field] = counted(used + dropped, "row")
        if dropped:
            reasons = ", ".join(f"{count} {fault}" for fault, count in sorted(faults.items()))
            texts[field] += f", {used} used, {dropped} left out ({reasons})"
    return texts


def _schedule(optimizer: Optimizer, steps: int) -> str:
    text = f"{optimizer.lr:g} in {counted(steps, 'optimizer step')}, "
    if optimizer.warmup:
        text += f"rising over the first {optimizer.warmup:.0%}, then "
    ends = {"constant": "constant", "anneal": "annealed to 0 by the steps of the run"}
    return text + (ends.get(optimizer.schedule) or f"{optimizer.schedule} to {optimizer.final_lr:g}")


def print_memory(config: RunConfig) -> None:
    """Prints the memory of each device in each phase, and what would help where it may not fit."""
    out = Console(highlight=False)
    room = capacity(config)
    peaks = 0
    offloaded = 0
    worries = list[str]()
    devices = [(plan, tuple(plan.phases())) for plan in plan_memory(config)]
    for phases, same in groupby(devices, key=lambda entry: entry[1]):
        members = [plan for plan, _ in same]
        first = members[0].device
        last = members[-1].device
        name = f"device {first}" if first == last else f"devices {first}-{last}"
        out.print(_memory_table(f"{name}, GiB", phases))
        out.print()
        peaks += len(members) * _largest(phases, "peak")
        offloaded += len(members) * _largest(phases, "offloaded")
        for phase in phases:
            if phase.peak > room.nbytes:
                fix = advice(config, members[0], phase, excess=phase.peak - room.nbytes)
                worries.append(f"{phase.phase} on {name} may not fit, {format_bytes(phase.peak)}: {fix}")
    lines = [f"{format_bytes(room.nbytes)} ({room.source})"]
    if room.shared:
        lines[0] += f"; at most {format_bytes(peaks)} on all virtual devices together"
    elif offloaded:
        lines[0] += f" on each device; at most {format_bytes(offloaded)} on the hosts"
        lines[0] += " for offloaded roles and checkpoints"
    rollout = config.engine_settings
    if rollout is not None and fills_device(rollout, config.cluster.device) and not room.known:
        text = "the KV cache is counted as 4 GiB, because the memory of the GPUs is unknown; engines will fill "
        lines.append(f"{text}what the plan leaves of theirs. Set cluster.device_memory_gib to see how much")
    if isinstance(config, TrainingConfig):
        for text in _adapters(config):
            out.print(f"{'adapters':{_KEY_WIDTH}}{text}", soft_wrap=True, markup=False)
    for line in (*lines, *worries):
        out.print(f"{'memory':{_KEY_WIDTH}}{line}", soft_wrap=True, markup=False)


def _memory_table(title: str, phases: Sequence[PhaseMemory]) -> Table:
    table = Table(box=None)
    table.add_column(title, min_width=22, no_wrap=True)
    for phase in phases:
        table.add_column(phase.phase, justify="right")
    table.add_row("", *(phase.role or "" for phase in phases))
    for name, text in _MEMORY_ROWS.items():
        if _largest(phases, name):
            sizes = [getattr(phase, name) for phase in phases]
            table.add_row(text, *(f"{size / 2**30:.2f}" if size else "" for size in sizes))
    return table


def _largest(phases: Sequence[PhaseMemory], name: str) -> int:
    return max((getattr(phase, name) for phase in phases), default=0)
