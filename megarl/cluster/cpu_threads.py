"""The threads of the processes on virtual devices, from the cores of this machine, or of several like it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config import RunConfig, parse_devices
from megarl.config.schema import Cluster, Threads

_CGROUP = Path("/sys/fs/cgroup/cpu.max")


def with_threads[C: RunConfig](config: C, earlier: Mapping[str, Any]) -> C:
    """Returns a configuration with numbers for `auto` in `cluster.threads_per_device`.

    Args:
        earlier: configuration of a resumed run, which keeps its numbers; empty for a new run.
    """
    threads = config.cluster.threads_per_device
    if None not in (threads.trainers, threads.engines):
        return config
    if config.cluster.device == "cuda":
        known = Threads()
    elif earlier:
        known = Threads.model_validate(earlier.get("cluster", {}).get("threads_per_device", {}))
    else:
        known = divided(config, usable_cores())
    numbers = {name: number for name, number in threads if number is not None}
    cluster = config.cluster.model_copy(update={"threads_per_device": known.model_copy(update=numbers)})
    return config.model_copy(update={"cluster": cluster})


def kept_message(config: RunConfig, earlier: Mapping[str, Any]) -> str | None:
    """Returns the message that a resumed run keeps other numbers than `auto` would be now; None if they are equal."""
    kept = with_threads(config, earlier).cluster.threads_per_device
    new = with_threads(config, {}).cluster.threads_per_device
    if kept == new:
        return None
    fix = "give numbers to change them"
    return f"cluster.threads_per_device stays {kept}, as the run began; auto would now be {new}: {fix}"


def divided(config: RunConfig, cores: int) -> Threads:
    """Divides the cores of each machine among its processes that work at the same time."""
    trainers: list[int] = []
    for group in config.groups:
        trainers += config.device_list(group)
    engines: list[int] = []
    rollout = config.engine_settings
    if rollout is not None:
        engines += parse_devices(rollout.devices)
        if rollout.max_staleness > 0 or rollout.inference_parts > 1:  # trainers and engines work at the same time
            trainers += engines
            engines = trainers
    cluster = config.cluster
    return Threads(trainers=_share(cores, trainers, cluster), engines=_share(cores, engines, cluster))


def _share(cores: int, devices: Sequence[int], cluster: Cluster) -> int:
    """Returns the cores of each of some devices, on the machine that has the most of the devices."""
    count = len(devices)
    if not cluster.is_here:  # otherwise its nodes are virtual
        count = max(Counter(device // cluster.devices_per_node for device in devices).values(), default=0)
    return max(1, cores // max(1, count))


def usable_cores() -> int:
    """Returns the cores that this process may use: its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no quota
        return cores
