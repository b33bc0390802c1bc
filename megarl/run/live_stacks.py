"""`megarl stacks`: what the processes of a live run do, and what they wait for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.cluster import ray_api
from megarl.cluster.hang_report import stacks_of_other_nodes, working_frames
from megarl.errors import RunError
from megarl.run.attempts import read_attempts
from megarl.run.paths import RunPaths, read_config
from megarl.stacks import IN_COLLECTIVE, ProcessStacks, take_stacks, write_stacks


def show_stacks(path: Path) -> None:
    """Writes the stacks of a run's processes into its directory, and prints where each is, and what it waits for.

    Raises:
        RunError: there is no such process.
    """
    run = RunPaths(path.absolute())
    found = take_stacks(run.logs)
    cluster: Any = read_config(run.config).get("cluster")
    address = cluster.get("address") if isinstance(cluster, Mapping) else None
    if address is not None:
        found += _elsewhere(run.logs, str(address))
    if not found:
        attempts = [attempt for attempt in read_attempts(run.attempts) if attempt.end is None]
        where = f"; its driver is on {attempts[-1].host}" if attempts else ""
        raise RunError(f"no process of {path} runs here, or they belong to another user{where}")
    directory = write_stacks(found, run.logs)
    for each in found:
        print(f"{each.name} (pid {each.pid} on {each.host}): {_place(each)}")
        for line in each.waits:
            if IN_COLLECTIVE in line or each.name == "driver":
                print(f"  {line}")
    print(f"the stacks are in {directory}")


def _elsewhere(logs: Path, address: str) -> list[ProcessStacks]:
    try:
        ray_api.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        print(f"other nodes are not asked: {error}")
        return []
    try:
        found, silent = stacks_of_other_nodes(logs)
    finally:
        ray_api.shutdown()
    if silent:
        print(f"nodes that do not answer: {', '.join(silent)}")
    return found


def _place(process: ProcessStacks) -> str:
    if process.silence:
        return process.silence
    if process.name == "driver":
        return "calls in progress" if process.waits else "no call is in progress"
    frames = working_frames(process.text)
    return str(frames[0]).strip() if frames else "it works on no call"
