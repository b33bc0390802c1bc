"""`megarl stacks`: what the processes of a live run do, and what they wait for."""

from __future__ import annotations

from pathlib import Path

from megarl.cluster import ray_api
from megarl.cluster.hang_report import stacks_of_other_nodes, working_frames
from megarl.errors import RunError
from megarl.run.attempts import read_attempts
from megarl.run.paths import RunPaths, field_at, read_config
from megarl.stacks import IN_COLLECTIVE, ProcessStacks, take_stacks, write_stacks


def show_stacks(path: Path) -> None:
    """Writes the stacks of a run's processes into its directory, and prints where each is, and what it waits for.

    Raises:
        RunError: there is no such process.
    """
    run = RunPaths(path.absolute())
    found = take_stacks(run.logs)
    address = field_at(read_config(run.config), "cluster.address")
    if address is not None:
        found += _other_nodes(run.logs, str(address))
    if not found:
        message = f"no process of {path} runs here, or they belong to another user"
        attempts = read_attempts(run.attempts)
        if attempts and attempts[-1].end is None:
            message += f"; its driver is on {attempts[-1].host}"
        elif attempts:
            message = f"the run in {path} has ended: it has no processes to show; see megarl status {path}"
        raise RunError(message)
    directory = write_stacks(found, run.logs)
    for each in found:
        print(f"{each.name} (pid {each.pid} on {each.host}): {_place(each)}")
        for line in each.waits:
            if IN_COLLECTIVE in line or each.name == "driver":
                print(f"  {line}")
    print(f"the stacks are in {directory}")


def _other_nodes(logs: Path, address: str) -> list[ProcessStacks]:
    try:
        ray_api.init(address=address)
    except (ConnectionError, RuntimeError) as error:
        print(f"no stacks of other nodes: {error}")
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
        return "calls in progress" if process.waits else "no call in progress"
    frames = working_frames(process.text)
    if not frames:
        return "it works on no call"
    return frames[0].strip()
