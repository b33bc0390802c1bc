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


def with_threads[C: RunConfig](config: C, earlier: Mapping[str, Any], cores: int | None = None) -> C:
    """Returns a configuration with numbers for `auto` in `cluster.threads_per_device`.

    Args:
        earlier: the configuration of a run that resumes, whose numbers it keeps; empty for one that begins.
        cores: number of cores; None: those available to this process.
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


def kept_message(config: RunConfig, earlier: Mapping[str, Any], cores: int | None = None) -> str | None:
    """Returns that a resumed run keeps other numbers than `auto` would be now; None if it does not."""
    kept = with_threads(config, earlier, cores).cluster.threads_per_device
    new = with_threads(config, {}, cores).cluster.threads_per_device
    if kept == new:
        return None
    fix = "give numbers to change them"
    return f"cluster.threads_per_device stays {kept}, as the run began; auto would now be {new}: {fix}"


def divided(config: RunConfig, cores: int) -> Threads:
    """Divides the cores of each machine among its processes that work at the same time."""
    rollout = config.engine_settings
    trainers = [device for group in config.groups for device in config.device_list(group)]
    engines = [] if rollout is None else list(parse_devices(rollout.devices))
    together = rollout is not None and (rollout.max_staleness > 0 or rollout.inference_parts > 1)
    among = (trainers + engines, trainers + engines) if together else (trainers, engines)
    each = [max(1, cores // max(1, _on_one_machine(devices, config.cluster))) for devices in among]
    return Threads(trainers=each[0], engines=each[1])


def _on_one_machine(devices: Sequence[int], cluster: Cluster) -> int:
    """Returns how many of some devices are on the machine that has the most of them."""
    if cluster.is_here:  # its nodes are virtual
        return len(devices)
    return max(Counter(device // cluster.devices_per_node for device in devices).values(), default=0)


def usable_cores() -> int:
    """Returns the cores that this process may use: its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no quota
        return cores
