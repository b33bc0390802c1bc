"""A Ray head with a dashboard and a token on this machine, as a user starts it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from megarl.cluster.cleanup import MARK, ProcessCleanup
from megarl.cluster.ray_node import ENVIRONMENT
from tests.needs import lacking
from tests.slurm.files import free_ports

ROOT = Path(__file__).resolve().parents[2]
DEVICES = 4
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
_READY_S = 120
_END_S = 20
_PORTS = (
    "port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "ray-client-server-port",
)


class RayHead:
    """A context: inside, the head is ready for jobs; afterwards nothing of it is left.

    Args:
        directory: for Ray's files; its path is short.
    """

    def __init__(self, directory: Path) -> None:
        self._mark = secrets.token_hex(8)
        secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = {**os.environ, **secret, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self.address = f"http://127.0.0.1:{ports['dashboard-port']}"
        self._log = directory / "head.log"
        self._command = [
            *(str(PYTHON), "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
            *(f"--{name}={port}" for name, port in ports.items()),
            *("--dashboard-host=127.0.0.1", "--min-worker-port=0", "--max-worker-port=0"),
            *("--num-cpus=1", f"--resources={json.dumps({'device': DEVICES})}", "--object-store-memory=200000000"),
            f"--temp-dir={directory / 'ray'}",
        ]

    def __enter__(self) -> RayHead:
        if not PYTHON.exists():
            lacking("no Ray with a dashboard: make ray installs it")
        with ExitStack() as ending:
            cleanup = ProcessCleanup(self._mark)
            ending.callback(cleanup.remove, _END_S)
            ending.callback(cleanup.note)
            log = ending.enter_context(self._log.open("w"))
            head = subprocess.Popen(self._command, env=self._own_environment(), stdout=log, stderr=log, cwd="/")
            ending.callback(head.wait)
            ending.callback(head.terminate)
            self._wait(head)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def launch(
        self, *arguments: str | Path, environment: Mapping[str, str] | None = None, address: str | None = None
    ) -> subprocess.Popen[str]:
        """Starts ``megarl launch ray`` for this cluster, under its own address or another one."""
        command = [sys.executable, "-m", "megarl", "launch", "ray", "--address", address or self.address]
        return subprocess.Popen(
            [*command, *map(str, arguments)],
            env=dict(self.environment if environment is None else environment),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _own_environment(self) -> dict[str, str]:
        return {**self.environment, **ENVIRONMENT, MARK: self._mark}

    def _wait(self, head: subprocess.Popen[bytes]) -> None:
        """Until the dashboard knows the node: it answers a moment earlier."""
        header = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        request = urllib.request.Request(f"{self.address}/api/v0/nodes", headers=header)
        deadline = time.monotonic() + _READY_S
        nodes = None
        while not nodes:
            assert head.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.2)
            with suppress(OSError), urllib.request.urlopen(request, timeout=_END_S) as answer:
                nodes = json.load(answer)["data"]["result"]["result"]


class ForwardedPort:
    """A context: connections to `address` are forwarded to the target, until they are cut.

    Args:
        target: as http://HOST:PORT.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> ForwardedPort:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Ends all connections; new ones can be made."""
        while self._connections:
            with suppress(OSError):
                self._connections.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = self._listener.accept()[0], socket.create_connection(self._target)
                self._connections += ends
                for source, sink in (ends, ends[::-1]):
                    threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
