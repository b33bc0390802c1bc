"""The Ray session of a run: started or joined at its beginning, and gone without a trace at its end."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from megarl.cluster import ray_api
from megarl.cluster.calls import Call, CallMonitor, Process
from megarl.cluster.cleanup import MARK, Guard, ProcessCleanup
from megarl.cluster.driver_environment import (
    environment,
    ignore_interrupts,
    interrupts_raise,
    raise_on_sigterm,
    random_token,
    temporary_directory,
)
from megarl.cluster.placement import Placement
from megarl.cluster.ray_node import DEVICE, ENVIRONMENT
from megarl.cluster.ray_worker import ChunkRefs, RayWorker
from megarl.config.schema import Cluster
from megarl.errors import RunError

W = TypeVar("W")
P = ParamSpec("P")
T = TypeVar("T")

_LOOPBACK = "127.0.0.1"
_LOCAL_ENV = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
_CPU_ENV = {"OMP_NUM_THREADS": "1"}
_END_GRACE_S = 5.0
_MIB = 1 << 20


class Session:
    """The cluster of a run: its devices, its processes and the calls on them.

    Without an address it starts a Ray of its own on this machine, closed by a random token, with its files in a
    directory of its own. However the ``with`` block is left, by an exception, an interrupt or SIGTERM too, every
    process, shared memory file and temporary file of that Ray is gone afterwards. A Ray that was joined keeps
    running; the session's processes in it end.

    Args:
        cluster: the run's devices.
        log_dir: where each process's output goes, a file per process.
        address: of a running Ray to join.
    """

    def __init__(self, cluster: Cluster, log_dir: Path, address: str | None = None) -> None:
        self._cluster = cluster
        self._log_dir = log_dir
        self._address = address
        self._ending = ExitStack()
        self._processes: list[Process[Any]] = []  # Ray ends a process when nobody has its handle
        self.monitor = CallMonitor(cluster.time_limits)

    def __enter__(self) -> Self:
        """Starts or joins Ray and reserves the devices.

        Raises:
            RunError: there is no cluster at the address, or it lacks the devices.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as ending:
            ending.enter_context(interrupts_raise())
            if self._address is None:
                self._start(ending)
            else:
                ending.callback(ray_api.shutdown)
                ending.callback(ignore_interrupts)
                self._join()
            raise_on_sigterm()  # again: ray.init installs a handler of its own
            self.placement = Placement(
                self._cluster.nodes, self._cluster.devices_per_node, virtual=self._address is None
            )
            self._ending = ending.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.__exit__(kind, error, trace)

    def launch(
        self, name: str, devices: Sequence[int], worker: Callable[P, W], *args: P.args, **kwargs: P.kwargs
    ) -> Process[W]:
        """Starts a process and returns at once; it makes its object at the first call, where mistakes show.

        Args:
            name: for messages and the log file, such as ``train rank 0``.
            devices: that it uses; the first one places it.
            worker: class of the object, which the process imports.
            args, kwargs: of the class.
        """
        return self._launch(name, devices[0], devices, worker, args, kwargs)

    def launch_beside(
        self, name: str, device: int, worker: Callable[P, W], *args: P.args, **kwargs: P.kwargs
    ) -> Process[W]:
        """As ``launch``, for a process that uses no device: it runs on the node of this one, and sees no GPU."""
        return self._launch(name, device, (), worker, args, kwargs)

    def _launch(
        self,
        name: str,
        place: int,
        devices: Sequence[int],
        worker: Callable[..., W],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Process[W]:
        log_file = self._log_dir.absolute() / f"{name.replace(' ', '-')}.log"
        gpus = tuple(self.placement.slots[device].local for device in devices)
        on_cpu = self._cluster.device == "cpu"
        remote = ray_api.remote(RayWorker).options(num_cpus=0, scheduling_strategy=self.placement.strategy(place))
        actor = remote.remote(
            f"{worker.__module__}:{worker.__qualname__}",  # by name: it is imported in the process's own environment
            args,
            kwargs,
            directory=os.getcwd(),
            env=_CPU_ENV if on_cpu else {},
            local_devices=None if on_cpu else gpus,
            log_file=str(log_file),
        )
        process = Process[W](name=name, actor=actor, log_file=log_file)
        self._processes.append(process)
        return process

    def share(self, values: Sequence[T]) -> ChunkRefs[T]:
        """Puts the driver's own chunks where every process can read them; they live as long as the references."""
        return ChunkRefs[T].put(values)

    @property
    def host(self) -> str:
        """Where the driver can be reached: loopback for a Ray of its own, else its node's address."""
        return _LOOPBACK if self._address is None else ray_api.node_address()

    def free_address(self, process: Process[Any]) -> str:
        """A ``host:port`` at which the process may listen: loopback on this machine, else its node's own address."""
        done = [process.actor.free_address.remote(_LOOPBACK if self._address is None else None)]
        call = Call[str](label="free_address", phase="start", processes=[process], done=done, monitor=self.monitor)
        return self.monitor.follow(call).wait()[0]

    def _join(self) -> None:
        """Joins a Ray that runs already."""
        try:
            ray_api.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError) as error:
            raise RunError(
                f"cluster.address = {self._address}: no Ray can be joined there ({error}); "
                "start it with ray start --head, or set cluster.address to null"
            ) from error

    def _start(self, ending: ExitStack) -> None:
        """Starts Ray on this machine; the ending undoes it in reverse."""
        mark = secrets.token_hex(8)
        directory = ending.enter_context(temporary_directory())
        ending.callback(Guard(mark, directory, os.environ).dismiss)  # for a SIGKILL: two of Ray's agents live a minute
        ending.enter_context(environment({**_LOCAL_ENV, MARK: mark}))
        ending.enter_context(random_token())
        cleanup = ProcessCleanup(mark)
        ending.callback(cleanup.remove, _END_GRACE_S)
        ending.callback(ray_api.shutdown)
        ending.callback(cleanup.note)
        ending.callback(ignore_interrupts)
        try:
            ray_api.init(
                address="local",  # whatever Ray RAY_ADDRESS names
                num_cpus=0,
                resources={DEVICE: self._cluster.nodes * self._cluster.devices_per_node},
                object_store_memory=self._cluster.object_store_mib * _MIB,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=directory,
            )
        except Exception as error:  # whatever Ray raises where one of its processes does not come up
            raise RunError(
                f"Ray did not start on this machine: {error}; look for a lack of memory or disk space, or for a machine"
                " that is too busy, and start again"
            ) from error
