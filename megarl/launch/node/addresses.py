"""Network interfaces of this machine and their addresses."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Final

_SIOCGIFADDR: Final = 0x8915
_NAME_BYTES, _ADDRESS = 15, slice(20, 24)
LOOPBACK: Final = "127.0.0.1"


def interface_addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {name: _address(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address is not None}


def address_of(interface: str) -> str:
    """The IPv4 address of an interface.

    Raises:
        ValueError: there is no such interface, or it has no address.
    """
    addresses = interface_addresses()
    if interface not in addresses:
        there = ", ".join(f"{name} ({address})" for name, address in addresses.items())
        raise ValueError(f"--interface {interface} is none of this node's interfaces with an address: {there}")
    return addresses[interface]


def interface_of(address: str) -> str | None:
    """The interface that has an address."""
    return next((name for name, own in interface_addresses().items() if own == address), None)


def _address(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[_ADDRESS])
        except OSError:  # it has none
            return None
