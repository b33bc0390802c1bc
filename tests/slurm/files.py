"""The files of a Slurm on one machine: two nodes on loopback, each with a daemon and a port of its own."""

from __future__ import annotations

import os
import pwd
import random
import socket
from pathlib import Path

NODES = ("n1", "n2")
GPUS = 8
# Below the ports that jobs use (10000 and up) and that the kernel gives to clients.
_PORTS = range(3000, 10000)


def free_ports(count: int) -> list[int]:
    """Different ports of this machine on which nothing listens."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            break
    return found


def write_files(directory: Path) -> None:
    """Writes slurm.conf and what goes with it into the directory of a cluster."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    controller, accounting, *daemons = free_ports(2 + len(NODES))
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={_host()} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs=64 RealMemory=64000 Gres=gpu:h100:{GPUS} Features=tested"
        for name, port in zip(NODES, daemons, strict=True)
    )
    # Jobs of two clusters on one machine have different numbers, and with them different ports.
    first_job = random.SystemRandom().randrange(1000, 50000)
    files = {
        "slurm.conf": f"""
ClusterName=loopback
SlurmctldHost={_host()}(127.0.0.1)
SlurmctldPort={controller}
SlurmctldPidFile={directory}/slurmctld.pid
StateSaveLocation={directory}/state
SlurmUser={user}
MailProg=/bin/true
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CryptoType=crypto/munge
PlugStackConfig={directory}/plugstack.conf

SlurmdUser={user}
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdSpoolDir={directory}/spool-%n
SlurmdLogFile={directory}/steps-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
KillWait=120
CompleteWait=0
MinJobAge=3600
FirstJobId={first_job}

SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,bf_resolution=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={accounting}
AccountingStoragePass={directory}/munge.socket

{nodes}
PartitionName=all Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE DefaultTime=10
""",
        "slurmdbd.conf": f"""
DbdHost=localhost
DbdPort={accounting}
PidFile={directory}/slurmdbd.pid
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
""",
        "gres.conf": "".join(f"Name=gpu Type=h100 File={directory}/gpu{index}\n" for index in range(GPUS)),
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
        "plugstack.conf": "",
    }
    for name, text in files.items():
        path = directory / name
        path.write_text(text.lstrip())
        path.chmod(0o600)  # slurmdbd refuses a file that others read
    for index in range(GPUS):  # a device must be one, but nobody uses it
        (directory / f"gpu{index}").symlink_to("/dev/null")
    (directory / "state").mkdir()
    for name in NODES:
        (directory / f"spool-{name}").mkdir()


def _host() -> str:
    return socket.gethostname().split(".")[0]
