"""The store listens at the given address only."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megarl.resharding import serve_store

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the tables of Linux")

LISTEN = "0A"


def listeners(port: int) -> list[tuple[int, bytes]]:
    """Family and address, in network order, of every socket of this process that listens at a port."""
    own = {target.stat().st_ino for target in Path("/proc/self/fd").iterdir() if target.is_socket()}
    found = []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            address, at = local.split(":")
            if int(at, 16) == port and state == LISTEN and int(inode) in own:
                words = [address[i : i + 8] for i in range(0, len(address), 8)]
                found.append((family, b"".join(bytes.fromhex(word)[::-1] for word in words)))
    return found


@pytest.mark.parametrize("host", ["", "127.0.0.2", "localhost", "::1"])
def test_a_store_listens_at_one_address(host: str) -> None:
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host or "127.0.0.1", 0, type=socket.SOCK_STREAM)[0]
        socket.create_server((address, 0), family=family).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    store = serve_store(host) if host else serve_store()
    assert listeners(store.port) == [(family, socket.inet_pton(family, address))]
    client = TCPStore(host or "127.0.0.1", store.port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"
