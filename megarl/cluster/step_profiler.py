"""The profiles of a run's steps: a trace of each chosen process, and the longest kernels of its calls."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.cluster.calls import Call, Process, ProcessLostError
from megarl.cluster.kernel_profile import CallProfile
from megarl.cluster.session import Session
from megarl.config import TrainingConfig
from megarl.files import write_durably

_ROWS = 10
_LEAST_SHARE = 0.01
_NAME_LENGTH = 90


class StepProfiler:
    """Profiles the steps and processes that `profile` names.

    Args:
        directory: directory of `step-N.json`, which has all kernels, and `step-N-PROCESS.json.gz`,
            traces for Perfetto.
    """

    def __init__(self, config: TrainingConfig, session: Session, directory: Path) -> None:
        self._session = session
        self._directory = directory.absolute()
        self._steps: tuple[int, ...] = ()
        self._names: list[str] = []
        profile = config.profile
        if profile is not None:
            self._steps = profile.profiled_steps(config.steps)
            for group in config.groups:
                self._names += [f"{group} rank {rank}" for rank in profile.ranks]
            for engine in profile.profiled_engines(config.engine_settings):
                self._names.append(f"rollout engine {engine}")

    @asynccontextmanager
    async def step(self, step: int) -> AsyncGenerator[None]:
        """Surrounds a step; prints the longest kernels of a profiled one."""
        if step not in self._steps:
            yield
            return
        self._directory.mkdir(exist_ok=True)
        session = self._session
        chosen: dict[Process[Any], None] = {}
        for process in session.processes:
            if process.name in self._names and not session.monitor.starts(process):
                chosen[process] = None
        begun = await self._switch(chosen)
        yield
        traces: dict[Process[Any], str] = {}
        for process in begun:
            if process in session.processes:  # otherwise it was replaced
                name = process.name.replace(" ", "-")
                traces[process] = str(self._directory / f"step-{step}-{name}.json.gz")
        profiles = await self._switch(traces)
        found: dict[str, list[dict[str, Any]]] = {}
        for process, calls in profiles.items():
            found[process.name] = [asdict(call) for call in calls]
        write_durably(self._directory / f"step-{step}.json", json.dumps(found, indent=1) + "\n")
        for process, calls in profiles.items():
            print(f"profile of step {step}, {process.name}; the trace is {traces[process]}")
            print("\n".join(kernel_rows(calls)), flush=True)

    async def _switch(self, traces: Mapping[Process[Any], str | None]) -> dict[Process[Any], Sequence[CallProfile]]:
        """Begins profiles, or ends those with a trace; whatever calls a lost process next deals with that."""
        calls: list[Call[Sequence[CallProfile]]] = []
        for process, trace in traces.items():
            done = process.actor.profile.remote(trace)
            call = self._session.call("profile", "checkpoint", [process], [done])
            call.survives_loss = True
            calls.append(call)
        profiles: dict[Process[Any], Sequence[CallProfile]] = {}
        for process, call in zip(traces, calls, strict=True):
            try:
                (profiles[process],) = await call
            except ProcessLostError as error:
                cause = str(error).splitlines()[0]
                print(f"{cause} There is no profile of {process.name}.", file=sys.stderr)
        return profiles


def kernel_rows(calls: Sequence[CallProfile]) -> Iterator[str]:
    """Yields a table of the longest kernels of each kind of call; short calls, below 1% of all, are left out."""
    total = sum(call.seconds for call in calls)
    for call in calls:
        if call.seconds >= _LEAST_SHARE * total:
            yield f"  {call.name}: {call.seconds:.3f} s"
            yield f"    {'seconds':>9} {'share':>6} {'times':>8}  kernel"
            for kernel in call.kernels[:_ROWS]:
                share = kernel.seconds / call.seconds
                yield f"    {kernel.seconds:9.3f} {share:6.1%} {kernel.calls:8}  {kernel.name[:_NAME_LENGTH]}"
