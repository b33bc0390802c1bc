"""The programs that tests start, and their Debian packages; `make slurm`, `chromium` and `sandbox` install them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SLURM = {
    "munged": "munge",
    "mariadbd": "mariadb-server-core",
    "slurmdbd": "slurmdbd",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
SHELLCHECK = {"shellcheck": "shellcheck"}
CHROMIUM = {"chromium": "chromium"}
BUBBLEWRAP = {"bwrap": "bubblewrap"}
POLICY = Path("/usr/sbin/policy-rc.d")


def program(name: str) -> str | None:
    """The path of a program; daemons are in directories that a user's PATH may lack."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")))


def missing(packages: Mapping[str, str]) -> list[str]:
    """The packages, by program, of which this machine lacks the program."""
    return sorted(package for name, package in packages.items() if program(name) is None)


def install(wanted: Mapping[str, str]) -> None:
    """Installs the packages that are missing; nothing is started, as the tests start daemons of their own.

    Raises:
        SystemExit: it needs root, or apt-get failed.
    """
    packages = missing(wanted)
    if not packages:
        return
    if os.geteuid() != 0 or program("apt-get") is None:
        raise SystemExit(f"{' '.join(packages)}: missing; installing needs apt-get and root")
    print("Installing", *packages, flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    denied = not POLICY.exists()
    if denied:  # exit status 101: packages must not start their services
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        with tempfile.TemporaryFile() as log:
            for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
                done = subprocess.run(["apt-get", "-qq", *command], env=environment, stdout=log, stderr=log)
                if done.returncode != 0:
                    log.seek(0)
                    sys.stderr.buffer.write(log.read())
                    raise SystemExit(f"apt-get {command[0]} failed")
    finally:
        if denied:
            POLICY.unlink()
    if lacking := missing(wanted):
        raise SystemExit(f"{' '.join(lacking)}: installed, but without the programs that the tests start")


if __name__ == "__main__":
    install({"slurm": SLURM | SHELLCHECK, "chromium": CHROMIUM, "sandbox": BUBBLEWRAP}[sys.argv[1]])
