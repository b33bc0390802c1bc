"""A Ray head with a dashboard and a token on this machine, as a user starts it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
import urllib.request
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
_JOB_S = 240
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
    """A context: inside, the head is ready for jobs; afterwards nothing of it is left."""

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
            head = subprocess.Popen(self._command, env=self._own_environment(), stdout=log, stderr=log, cwd=ROOT)
            ending.callback(head.wait)
            ending.callback(head.terminate)
            self._wait(head)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def job(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs `ray job` with the head's token."""
        return subprocess.run(
            [PYTHON, "-m", "ray.scripts.scripts", "job", *arguments],
            env={**self.environment, "RAY_ADDRESS": self.address},
            capture_output=True,
            text=True,
            timeout=_JOB_S,
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
