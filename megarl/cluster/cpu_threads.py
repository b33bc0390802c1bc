"""The threads of the processes on virtual devices, from the cores of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from megarl.config import EvalConfig, PPOConfig, RAFTConfig, RewardModelConfig, RunConfig, parse_devices
from megarl.config.schema import Threads

C = TypeVar("C", bound=RunConfig)

_CGROUP = Path("/sys/fs/cgroup/cpu.max")
_WITH_ENGINES = (EvalConfig, PPOConfig, RAFTConfig, RewardModelConfig)


def with_threads(config: C, earlier: Mapping[str, Any], cores: int | None = None) -> C:
    """Returns a configuration with numbers for `auto` in `cluster.threads_per_device`.

    Args:
        earlier: the configuration with which the run began, whose numbers a resumed run keeps; empty for a new run.
        cores: of this machine; None takes those that this process may use.
    """
    threads = config.cluster.threads_per_device
    if None not in (threads.trainers, threads.engines):
        return config
    known = divided(config, usable_cores() if cores is None else cores)
    if config.cluster.device == "cuda":
        known = Threads()
    elif earlier:
        known = Threads.model_validate(earlier.get("cluster", {}).get("threads_per_device", {}))
    numbers = {name: number for name, number in threads if number is not None}
    cluster = config.cluster.model_copy(update={"threads_per_device": known.model_copy(update=numbers)})
    return config.model_copy(update={"cluster": cluster})


def divided(config: RunConfig, cores: int) -> Threads:
    """Divides cores among the processes that work at the same time."""
    rollout = config.rollout if isinstance(config, _WITH_ENGINES) else None
    trainers = sum(len(config.device_list(group)) for group in config.groups)
    engines = 0 if rollout is None else len(parse_devices(rollout.devices))
    together = rollout is not None and (rollout.max_staleness > 0 or rollout.inference_parts > 1)
    among = (trainers + engines, trainers + engines) if together else (trainers, engines)
    each = [max(1, cores // max(1, processes)) for processes in among]
    return Threads(trainers=each[0], engines=each[1])


def usable_cores() -> int:
    """Returns the cores that this process may use: its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no quota
        return cores
