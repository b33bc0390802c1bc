"""The Ray session of a run, which leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from ray import ObjectRef
from ray.exceptions import RayError

from megarl.cluster import ray_api
from megarl.cluster.calls import Call, CallMonitor, Process, WorkerError
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
from megarl.cluster.placement import Placement
from megarl.cluster.ray_node import DEVICE, ENVIRONMENT, ray_directory
from megarl.cluster.ray_worker import RayWorker, SteppingRayWorker
from megarl.config.schema import Cluster
from megarl.errors import RunError
from megarl.remote import Phase
from megarl.stacks import answering

_LOOPBACK = "127.0.0.1"
_LOCAL_ENV = {
    **ENVIRONMENT,
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_gcs_server_port_wait_time_s": f"{ray_api.START_S:.0f}",
}
_END_GRACE_S = 5.0
_SIGN_OF_LIFE_S = 10.0
_MIB = 1 << 20
_MAX_CALLS = 1 << 16
"""Ray's limit of the calls in progress of a stepping process, far above what an engine generates at once."""


class Session:
    """The devices and processes of a run, as a context manager.

    Without `cluster.address`, it starts a Ray on this machine, on loopback and protected by a
    random token. When the `with` block ends, also by an exception, SIGINT or SIGTERM, every process,
    shared memory file and temporary file of that Ray is removed. A Ray that was joined keeps
    running; the session's processes end.

    Args:
        log_dir: directory of the processes' output, one file each.
    """

    def __init__(self, cluster: Cluster, log_dir: Path) -> None:
        self._cluster = cluster
        self._log_dir = log_dir
        self._ending = ExitStack()
        self.processes: list[Process[Any]] = []  # Ray ends a process without a handle
        self._files: list[Path] = []  # to remove at the end
        self._guard: Guard | None = None
        self._runner = asyncio.Runner(loop_factory=_event_loop)
        self.monitor = CallMonitor(cluster.time_limits)
        self._joins = cluster.address is not None
        self.monitor.explainer = partial(report_hang, logs=log_dir.absolute(), joined=self._joins)

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
                if self._joins:
                    ending.callback(ray_api.shutdown)
                    ending.callback(ignore_interrupts)
                    self._join()
                else:
                    self._start(ending)
            cluster = self._cluster
            self.placement = Placement(cluster.nodes, cluster.devices_per_node, virtual=not self._joins)
            ending.enter_context(self._runner)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Ends the session; raises WorkerError in place of an error of Ray, as after the loss of a node."""
        self._ending.__exit__(*exception)
        error = exception[1]
        if isinstance(error, RayError):
            raise WorkerError(f"An object of Ray's was lost, or there was no room for it: {error}") from error

    def run[X](self, work: Coroutine[Any, Any, X]) -> X:
        """Runs the work of the driver, which calls the processes, to its end; see `CallMonitor.run`."""
        return self._runner.get_loop().run_until_complete(self.monitor.run(work))

    def spawn[X](self, work: Coroutine[Any, Any, X]) -> asyncio.Task[X]:
        """Starts work beside that of `run`, which its error ends."""
        return self.monitor.spawn(work)

    def launch[W](self, name: str, worker: partial[W], devices: Sequence[int] = (), *, place: int = 0) -> Process[W]:
        """Starts a process, and returns at once; it creates its object at the first call.

        If the object has a method `step`, the process takes steps between calls; see
        `SteppingRayWorker`.

        Args:
            name: name in messages and of the log file, such as `train rank 0`.
            devices: devices that the process uses; it runs on the node of the first.
            place: a device of the node on which a process without devices runs; see `spread`.
        """
        log_file = self._log_dir.absolute() / f"{name.replace(' ', '-')}.log"
        if devices:
            place = devices[0]
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": self.placement.strategy(place)}
        actor_class = RayWorker
        threads = self._cluster.threads_per_device.trainers
        stepping = hasattr(worker.func, "step")
        if stepping:
            options["max_concurrency"] = _MAX_CALLS
            actor_class = SteppingRayWorker
            threads = self._cluster.threads_per_device.engines
        env: Mapping[str, str] = {}
        gpus: list[int] | None = None
        if self._cluster.device == "cpu":
            env = _cpu_environment(threads if devices else 1)
        else:
            gpus = [device % self._cluster.devices_per_node for device in devices]
        target = f"{worker.func.__module__}:{worker.func.__qualname__}"
        actor_options = ray_api.untyped.remote(actor_class).options(**options)
        actor = actor_options.remote(
            target,  # imported by the process, in its environment
            worker.args,
            worker.keywords,
            directory=os.getcwd(),
            env=env,
            local_devices=gpus,
            log_file=str(log_file),
        )
        process = Process[W](name=name, actor=actor, log_file=log_file, concurrent=stepping)
        self.processes.append(process)
        return process

    def spread(self, count: int) -> list[int]:
        """Returns places for `launch` of `count` processes without devices, over all nodes."""
        devices = self._cluster.nodes * self._cluster.devices_per_node
        return [index * devices // count for index in range(count)]

    def remove_at_end(self, file: Path) -> None:
        """Removes a file when the session ends; on a Ray of its own also after a SIGKILL of this process."""
        self._files.append(file)
        if self._guard is not None:
            self._guard.remove(file)

    def end(self, process: Process[Any]) -> None:
        """Ends a process, also one that is stopped or dead, and waits until it is gone, for a while."""
        self.processes.remove(process)
        ray_api.untyped.kill(process.actor, no_restart=True)
        ray_api.wait([process.actor.free_address.remote(_LOOPBACK)], count=1, timeout=_END_GRACE_S)

    def silent(self, processes: Sequence[Process[Any]]) -> list[Process[Any]]:
        """Returns the stepping processes that give no sign of life, such as stopped ones; waits for one a while."""
        signs = [process.actor.sign_of_life.remote() for process in processes]
        seen = ray_api.wait(signs, count=len(signs), timeout=_SIGN_OF_LIFE_S)
        return [process for process, sign in zip(processes, signs, strict=True) if sign not in seen]

    def call(
        self, label: str, phase: Phase, processes: Sequence[Process[Any]], done: Sequence[ObjectRef[Any]]
    ) -> Call[Any]:
        """Watches a call on some processes, whose results `done` refers to."""
        monitor = self.monitor
        call = Call[Any](label=label, phase=phase, processes=processes, done=done, monitor=monitor)
        return monitor.follow(call)

    @property
    def host(self) -> str:
        """Returns the address of the driver: loopback for a Ray of its own, else the node's address."""
        return ray_api.node_address() if self._joins else _LOOPBACK

    async def free_address(self, process: Process[Any]) -> str:
        """Returns a free `host:port` of a process: on loopback for a Ray of its own, else on its node's address."""
        host = None if self._joins else _LOOPBACK
        done = process.actor.free_address.remote(host)
        (address,) = await self.call("free_address", "start", [process], [done])
        return address

    def _remove_files(self) -> None:
        for file in self._files:
            with suppress(OSError):
                file.unlink()

    def _join(self) -> None:
        try:
            ray_api.init(address=self._cluster.address)
        except (ConnectionError, RuntimeError) as error:
            raise RunError(
                f"cluster.address = {self._cluster.address}: no Ray can be joined there ({error}); "
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
        ray_api.wait_for_slow_starts()
        try:
            ray_api.init(
                address="local",  # regardless of RAY_ADDRESS
                num_cpus=0,
                resources={DEVICE: self._cluster.nodes * self._cluster.devices_per_node},
                object_store_memory=self._cluster.object_store_mib * _MIB,
                include_dashboard=False,
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
    variables = {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    if threads > 1:
        variables["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that wait actively would take cores from other processes
    return variables
