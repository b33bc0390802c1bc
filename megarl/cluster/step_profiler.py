"""The profiles of a run's steps: a trace of each chosen process, and the longest kernels of its calls."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

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
        directory: gets `step-N.json` with all kernels, and `step-N-PROCESS.json.gz`, a trace for Perfetto.
    """

    def __init__(self, config: TrainingConfig, session: Session, directory: Path) -> None:
        self._session = session
        self._directory = directory.absolute()
        self._steps: tuple[int, ...] = ()
        self._names: list[str] = []
        if config.profile is not None:
            self._steps = config.profile.profiled_steps(config.steps)
            self._names += [f"{group} rank {rank}" for group in config.groups for rank in config.profile.ranks]
            self._names += [
                f"rollout engine {engine}" for engine in config.profile.profiled_engines(config.engine_settings)
            ]

    @asynccontextmanager
    async def step(self, step: int) -> AsyncGenerator[None]:
        """Surrounds a step; prints the longest kernels of a profiled one."""
        if step not in self._steps:
            yield
            return
        self._directory.mkdir(exist_ok=True)
        begun = await self._session.begin_profile(self._names)
        yield
        traces = {name: self._directory / f"step-{step}-{name.replace(' ', '-')}.json.gz" for name in self._names}
        profiles = await self._session.end_profile({process: str(traces[process.name]) for process in begun})
        found = {name: [asdict(call) for call in calls] for name, calls in profiles.items()}
        write_durably(self._directory / f"step-{step}.json", json.dumps(found, indent=1) + "\n")
        for name, calls in profiles.items():
            head = f"profile of step {step}, {name}; the trace is {traces[name]}"
            print("\n".join([head, *kernel_rows(calls)]), flush=True)


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
