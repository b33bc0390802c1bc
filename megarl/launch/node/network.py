"""Ports and addresses of a node."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
from collections.abc import Sequence
from typing import Final

from megarl.launch.node.slurm_job import SlurmJob

_FIRST = 10000
_SIZE = 100
_BLOCKS = 227
_CANDIDATES = 8
_STRIDE = 61
_CHECKED = 11  # the first port, which claims the block, and those of Ray's services; its workers skip ports in use
_SIOCGIFADDR = 0x8915
_DISCARD = 9
_CONNECT_S = 5.0
LOOPBACK: Final = "127.0.0.1"


def port_blocks(job: int) -> tuple[range, ...]:
    """Returns the blocks of ports that a job's nodes try, in order; consecutive jobs have different first ones."""
    blocks: list[range] = []
    for step in range(_CANDIDATES):
        start = _FIRST + (job + step * _STRIDE) % _BLOCKS * _SIZE
        blocks.append(range(start, start + _SIZE))
    return tuple(blocks)


class PortBlock:
    """The first free block of ports, held until `close`. Raises OSError if none is free."""

    def __init__(self, blocks: Sequence[range]) -> None:
        for block in blocks:
            claim = _listen(block[0])
            if claim is None:
                continue
            others = [_listen(port) for port in block[1:_CHECKED]]
            for other in others:
                if other is not None:
                    other.close()
            if None not in others:
                self._claim = claim
                self.ports = block[1:]
                return
            claim.close()
        tried = ", ".join(f"{block[0]}-{block[_CHECKED - 1]}" for block in blocks)
        raise OSError(errno.EADDRINUSE, f"each of these ranges has a port that is taken: {tried}")

    def close(self) -> None:
        self._claim.close()


def _listen(port: int) -> socket.socket | None:
    try:
        return socket.create_server(("", port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def interface_addresses() -> dict[str, str]:
    """Returns the IPv4 addresses of the network interfaces that have one."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
            except OSError:  # it has none
                continue
    return found


def address_of(interface: str) -> str:
    """Returns the IPv4 address of an interface. Raises ValueError if it does not exist or has none."""
    addresses = interface_addresses()
    if interface not in addresses:
        known = ", ".join(f"{name} ({address})" for name, address in addresses.items())
        raise ValueError(f"--interface {interface} is none of this node's interfaces with an address: {known}")
    return addresses[interface]


def interface_of(address: str) -> str | None:
    """Returns the name of the interface with an IPv4 address; None without one."""
    for name, known in interface_addresses().items():
        if known == address:
            return name
    return None


def address_towards(host: str) -> str:
    """Returns this machine's address on the route to a host, without sending. Raises OSError if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD))
        return probe.getsockname()[0]


def head_address(job: SlurmJob) -> str:
    """Returns the address at which the other nodes reach the first one, which calls this.

    A batch script's srun runs on the first node, and Slurm sets its address. If srun runs
    elsewhere, or the address is loopback's, the route to the second node decides. Raises OSError if
    that node's name is unknown.
    """
    if len(job.nodes) == 1:
        return LOOPBACK
    launcher = job.launcher
    if launcher not in (None, LOOPBACK) and launcher in interface_addresses().values():
        return launcher
    try:
        return address_towards(job.nodes[1])
    except OSError:
        if launcher != LOOPBACK:
            raise
        return LOOPBACK


def is_reachable(address: str) -> bool:
    """Whether a server accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True
