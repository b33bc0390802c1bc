"""An empty MariaDB for the accounting, in a directory of its own, reached through a socket there alone."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from tests.debian import program
from tests.slurm.daemons import DaemonError

_SYSTEM_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")


def database(directory: Path) -> tuple[str, ...]:
    """Makes the database; returns the options of its server, which keeps nothing safe."""
    (directory / "mysql").mkdir(parents=True)
    directory.chmod(0o700)
    options = (
        "--no-defaults",
        f"--datadir={directory}",
        f"--user={os.geteuid()}",
        f"--socket={directory / 'socket'}",
        f"--pid-file={directory / 'pid'}",
        "--skip-networking",
        "--innodb-buffer-pool-size=16M",
        "--innodb-log-file-size=4M",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-flush-method=nosync",
        "--skip-innodb-doublewrite",
    )
    # As mariadb-install-db does, which is in another package and sets up users as well.
    tables = b"use mysql;\n" + _SYSTEM_TABLES.read_bytes()
    done = subprocess.run([program("mariadbd") or "", *options, "--bootstrap"], input=tables, capture_output=True)
    if done.returncode != 0:
        raise DaemonError(f"mariadbd could not make a database:\n{done.stderr.decode(errors='replace')}")
    return options


def unreachable(path: Path) -> str:
    """Why nothing answers on a Unix socket; empty if something does."""
    with socket.socket(socket.AF_UNIX) as probe:
        code = probe.connect_ex(str(path))
    return f"{path.name}: {os.strerror(code)}" if code else ""
