"""The Ray session of a run, which leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from ray.exceptions import RayError

from megarl.cluster import ray_api
from megarl.cluster.calls import Call, CallMonitor, Process, ProcessLostError, WorkerError
from megarl.cluster.cleanup import MARK, Guard, ProcessCleanup
from megarl.cluster.driver_environment import (
    environment,
    ignore_interrupts,
    interrupts_raise,
    no_interrupt_is_lost,
    on_loopback,
    random_token,
    temporary_directory,
)
from megarl.cluster.hang_report import report_hang
from megarl.cluster.kernel_profile import CallProfile
from megarl.cluster.placement import Placement
from megarl.cluster.ray_node import DEVICE, ENVIRONMENT, ray_directory
from megarl.cluster.ray_worker import RayProcess, RayWorker, SteppingRayWorker
from megarl.config.schema import Cluster
from megarl.errors import RunError
from megarl.stacks import answering

W = TypeVar("W")
P = ParamSpec("P")

_LOOPBACK = "127.0.0.1"
_LOCAL_ENV = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
_END_GRACE_S = 5.0
_SIGN_OF_LIFE_S = 10.0
_MIB = 1 << 20
_CONCURRENT: Mapping[type[RayProcess], Mapping[str, int]] = {
    RayWorker: {},
    SteppingRayWorker: {"max_concurrency": 1 << 16},  # calls in progress, far above what engines generate at once
}
"""Ray's options of the processes that take a call before the last one has ended."""


class Session:
    """The devices and processes of a run, as a context manager.

    Without an address, it starts a Ray on this machine, on loopback and protected by a random token. When the `with`
    block ends, also by an exception, SIGINT or SIGTERM, every process, shared memory file and temporary file of that
    Ray is removed. A Ray that was joined keeps running; the session's processes end.

    Args:
        log_dir: directory of the processes' output, one file each.
        address: address of a running Ray to join.
    """

    def __init__(self, cluster: Cluster, log_dir: Path, address: str | None = None) -> None:
        self._cluster = cluster
        self._log_dir = log_dir
        self._address = address
        self._ending = ExitStack()
        self._processes: list[Process[Any]] = []  # Ray ends a process without a handle
        self._files: list[Path] = []  # to remove at the end
        self._guard: Guard | None = None
        self._runner = asyncio.Runner(loop_factory=_event_loop)
        self.monitor = CallMonitor(cluster.time_limits)
        self.monitor.explainer = partial(report_hang, logs=log_dir.absolute(), joined=address is not None)

    def __enter__(self) -> Self:
        """Starts or joins Ray, and reserves the devices.

        Raises:
            RunError: Ray does not start, there is none at the address, or it lacks the devices.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as ending:
            ending.enter_context(interrupts_raise())
            ending.callback(self._remove_files)
            ending.enter_context(answering(self._log_dir / "driver.log", lambda: self.monitor.in_progress()))
            with no_interrupt_is_lost():
                if self._address is None:
                    self._start(ending)
                else:
                    ending.callback(ray_api.shutdown)
                    ending.callback(ignore_interrupts)
                    self._join()
            self.placement = Placement(
                self._cluster.nodes, self._cluster.devices_per_node, virtual=self._address is None
            )
            ending.enter_context(self._runner)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Ends the session; raises WorkerError in place of an error of Ray, as after the loss of a node."""
        self._ending.__exit__(*exception)
        if isinstance(error := exception[1], RayError):
            raise WorkerError(f"An object of Ray's was lost, or there was no room for it: {error}") from error

    def run[X](self, work: Coroutine[Any, Any, X]) -> X:
        """Runs the work of the driver, which calls the processes, to its end; see `CallMonitor.run`."""
        return self._runner.get_loop().run_until_complete(self.monitor.run(work))

    def spawn[X](self, work: Coroutine[Any, Any, X]) -> asyncio.Task[X]:
        """Starts work beside that of `run`, which its error ends."""
        return self.monitor.spawn(work)

    def launch(
        self, name: str, devices: Sequence[int], worker: Callable[P, W], *args: P.args, **kwargs: P.kwargs
    ) -> Process[W]:
        """Starts a process on the node of the first of its devices; see `launch_at`."""
        threads = self._cluster.threads_per_device.trainers
        return self._launch(name, devices[0], devices, RayWorker, threads, worker, args, kwargs)

    def launch_stepping(
        self, name: str, devices: Sequence[int], worker: Callable[P, W], *args: P.args, **kwargs: P.kwargs
    ) -> Process[W]:
        """Like `launch`; the process takes steps of its object between calls, see `SteppingRayWorker`."""
        threads = self._cluster.threads_per_device.engines
        return self._launch(name, devices[0], devices, SteppingRayWorker, threads, worker, args, kwargs)

    def launch_stepping_at(
        self, name: str, place: int, worker: Callable[P, W], *args: P.args, **kwargs: P.kwargs
    ) -> Process[W]:
        """Like `launch_at`, without devices; a call does not wait for the end of earlier ones."""
        return self._launch(name, place, (), SteppingRayWorker, 1, worker, args, kwargs)

    def launch_at(
        self, name: str, place: int, devices: Sequence[int], worker: Callable[P, W], *args: P.args, **kwargs: P.kwargs
    ) -> Process[W]:
        """Starts a process, and returns at once; the process creates its object, a `worker`, at the first call.

        Args:
            name: used in messages and for the log file, such as `train rank 0`.
            place: a device of the node on which the process runs.
            devices: devices that the process uses.
        """
        return self._launch(name, place, devices, RayWorker, 1, worker, args, kwargs)

    def _launch(
        self,
        name: str,
        place: int,
        devices: Sequence[int],
        kind: type[RayWorker | SteppingRayWorker],
        threads: int | None,
        worker: Callable[..., W],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Process[W]:
        log_file = self._log_dir.absolute() / f"{name.replace(' ', '-')}.log"
        gpus = tuple(self.placement.slots[device].local for device in devices)
        on_cpu = self._cluster.device == "cpu"
        strategy = self.placement.strategy(place)
        actor = (
            ray_api.remote(kind)
            .options(num_cpus=0, scheduling_strategy=strategy, **_CONCURRENT[kind])
            .remote(
                f"{worker.__module__}:{worker.__qualname__}",  # imported by the process, in its environment
                args,
                kwargs,
                directory=os.getcwd(),
                env=_cpu_environment(threads) if on_cpu else {},
                local_devices=None if on_cpu else gpus,
                log_file=str(log_file),
            )
        )
        process = Process[W](name=name, actor=actor, log_file=log_file, concurrent=bool(_CONCURRENT[kind]))
        self._processes.append(process)
        return process

    def remove_at_end(self, file: Path) -> None:
        """Removes a file when the session ends; on a Ray of its own also after a SIGKILL of this process."""
        self._files.append(file)
        if self._guard is not None:
            self._guard.remove(file)

    def end(self, process: Process[Any]) -> None:
        """Ends a process, also one that is stopped or dead, and waits until it is gone, for a while."""
        self._processes.remove(process)
        ray_api.kill(process.actor)
        ray_api.wait([process.actor.free_address.remote(_LOOPBACK)], count=1, timeout=_END_GRACE_S)

    def silent(self, processes: Sequence[Process[Any]]) -> list[Process[Any]]:
        """Returns the stepping processes that give no sign of life, such as stopped ones; waits for one a while."""
        signs = [process.actor.sign_of_life.remote() for process in processes]
        seen = ray_api.wait(signs, count=len(signs), timeout=_SIGN_OF_LIFE_S)
        return [process for process, sign in zip(processes, signs, strict=True) if sign not in seen]

    async def begin_profile(self, names: Collection[str]) -> list[Process[Any]]:
        """Begins to profile processes; returns them, without those that are still starting or are lost."""
        chosen = (process for process in self._processes if process.name in names)
        ready = [process for process in chosen if not self.monitor.starts(process)]
        return list(await self._profile(dict.fromkeys(ready)))

    async def end_profile(self, traces: Mapping[Process[Any], str]) -> dict[str, Sequence[CallProfile]]:
        """Ends the profiles of processes, each with the file of its trace.

        Returns what the processes computed, by name, without those that were replaced or are lost.
        """
        found = await self._profile({process: traces[process] for process in traces if process in self._processes})
        return {process.name: calls for process, calls in found.items()}

    async def _profile(self, traces: Mapping[Process[Any], str | None]) -> dict[Process[Any], Sequence[CallProfile]]:
        """Begins profiles, or ends those with a trace. A lost process has none; what calls it next deals with that."""
        calls: list[Call[Sequence[CallProfile]]] = []
        for process, trace in traces.items():
            done = [process.actor.profile.remote(trace)]
            call = Call[Sequence[CallProfile]](
                label="profile",
                phase="checkpoint",
                processes=[process],
                done=done,
                monitor=self.monitor,
                survives_loss=True,
            )
            calls.append(self.monitor.follow(call))
        profiles: dict[Process[Any], Sequence[CallProfile]] = {}
        for call in calls:
            (process,) = call.processes
            try:
                (profiles[process],) = await call
            except ProcessLostError as error:
                cause = str(error).splitlines()[0]
                print(f"{cause} There is no profile of {process.name}.", file=sys.stderr, flush=True)
        return profiles

    @property
    def host(self) -> str:
        """Returns the address of the driver: loopback for a Ray of its own, else the node's address."""
        return _LOOPBACK if self._address is None else ray_api.node_address()

    async def free_address(self, process: Process[Any]) -> str:
        """Returns a free `host:port` of a process: on loopback for a Ray of its own, else on its node's address."""
        done = [process.actor.free_address.remote(_LOOPBACK if self._address is None else None)]
        call = Call[str](label="free_address", phase="start", processes=[process], done=done, monitor=self.monitor)
        (address,) = await self.monitor.follow(call)
        return address

    def _remove_files(self) -> None:
        for file in self._files:
            with suppress(OSError):
                file.unlink()

    def _join(self) -> None:
        try:
            ray_api.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError) as error:
            raise RunError(
                f"cluster.address = {self._address}: no Ray can be joined there ({error}); "
                "start it with ray start --head, or set cluster.address to null"
            ) from error

    def _start(self, ending: ExitStack) -> None:
        """Starts Ray on this machine, and adds what undoes it to `ending`."""
        mark = secrets.token_hex(8)
        directory = ending.enter_context(temporary_directory())
        self._guard = Guard(mark, directory, os.environ)  # for a SIGKILL: an agent of Ray's lives on
        ending.callback(self._guard.dismiss)
        ending.enter_context(environment({**_LOCAL_ENV, MARK: mark}))
        ending.enter_context(random_token())
        ending.enter_context(on_loopback())
        cleanup = ProcessCleanup(mark)
        ending.callback(cleanup.remove, _END_GRACE_S)
        ending.callback(ray_api.shutdown)
        ending.callback(cleanup.note)
        ending.callback(ignore_interrupts)
        ray_api.skip_idle_processes()
        try:
            ray_api.init(
                address="local",  # regardless of RAY_ADDRESS
                num_cpus=0,
                resources={DEVICE: self._cluster.nodes * self._cluster.devices_per_node},
                object_store_memory=self._cluster.object_store_mib * _MIB,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=ray_directory(directory),
            )
        except Exception as error:  # Ray raises several kinds where one of its processes does not start
            raise RunError(
                f"Ray did not start on this machine: {error}; look for a lack of memory or disk space, for a machine"
                " that is too busy, or for who has ended one of Ray's processes, and start again"
            ) from error


def _event_loop() -> asyncio.AbstractEventLoop:
    """Returns a loop whose tasks begin at once, so that they make their first calls in the order of the program."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)
    return loop


def _cpu_environment(threads: int | None) -> dict[str, str]:
    """Returns the environment of a process on virtual devices."""
    assert threads is not None, "with_threads comes first"
    # Threads that wait actively would take the cores from those that they wait for, where others work, too.
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"} if threads > 1 else {}
    return {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", **waiting}
