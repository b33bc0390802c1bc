"""The sockets at which processes listen, and what they answer to somebody without the secret."""

from __future__ import annotations

import http.client
import ipaddress
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

LISTENING = "0A"
METHODS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "InternalKVGcsService/InternalKVKeys",
    "JobInfoGcsService/GetAllJobInfo",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull",
    "CoreWorkerService/GetCoreWorkerStats",
)
"""One of each of Ray's services: of its GCS, of a raylet, of its object manager, of every process."""
REFUSED = ("UNAUTHENTICATED", "UNIMPLEMENTED", "401", "405")
"""UNIMPLEMENTED and 405 are answers of another service, which lacks the call."""
AGENT = "/get_or_create_runtime_env"
"""Of Ray's agent, which would install what the request names."""


@dataclass(frozen=True)
class Listener:
    """A listening socket: its address, whether that is loopback's, and the command of its process."""

    port: int
    on_loopback: bool
    program: str


def listeners(pids: Collection[int]) -> Iterator[Listener]:
    """Yields the TCP sockets at which the processes listen."""
    owners: dict[str, int] = {}
    for pid in pids:
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    owners[os.readlink(link)] = pid
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            owner = owners.get(f"socket:[{inode}]")
            if state == LISTENING and owner is not None:
                address, port = local.split(":")
                words = [address[i : i + 8] for i in range(0, len(address), 8)]
                host = ipaddress.ip_address(b"".join(bytes.fromhex(word)[::-1] for word in words))
                with suppress(OSError):
                    command = Path(f"/proc/{owner}/cmdline").read_text().replace("\0", " ")
                    yield Listener(int(port, 16), (getattr(host, "ipv4_mapped", None) or host).is_loopback, command)


def answers(found: Listener) -> dict[str, str]:
    """The status of each of Ray's calls without a token, by method; nothing from what speaks neither gRPC nor HTTP."""
    status: dict[str, str] = {}
    with grpc.insecure_channel(f"127.0.0.1:{found.port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=2)
        except grpc.FutureTimeoutError:
            return _over_http(found)
        for method in METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=5)
                status[method] = "OK"
            except grpc.RpcError as error:
                status[method] = error.code().name  # pyright: ignore[reportAttributeAccessIssue]
    return status


def assert_closed(pids: Collection[int]) -> dict[str, set[str]]:
    """Asserts that all sockets of processes are on loopback, and that none answers a call without the token.

    Returns the status that each of Ray's calls had somewhere.
    """
    found = list(listeners(pids))
    assert found
    assert not [each for each in found if not each.on_loopback]
    seen: dict[str, set[str]] = {}
    with ThreadPoolExecutor(len(found)) as threads:
        for each, status in zip(found, threads.map(answers, found), strict=True):
            for method, code in status.items():
                assert code in REFUSED, f"{each}: {method} is answered without a token: {code}"
                seen.setdefault(method, set()).add(code)
    return seen


def _over_http(found: Listener) -> dict[str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=2)
    try:
        connection.request("POST", AGENT, body=b"")
        return {"HTTP": str(connection.getresponse().status)}
    except (OSError, http.client.HTTPException):
        return {}
    finally:
        connection.close()
