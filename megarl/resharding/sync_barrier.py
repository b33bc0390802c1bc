"""Barriers of the ranks of a sync, with abort, and their statistics."""

from __future__ import annotations

import socket
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter
from typing import NoReturn

from torch.distributed import (
    DistStoreError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from megarl.errors import RunError


class SyncError(RunError):
    """A sync was aborted, on all ranks with the same message: rank, tensor and reason."""


class PeerError(RuntimeError):
    """A transfer failed; the message names the rank."""


@dataclass(kw_only=True)
class SyncStats:
    """One rank's statistics of one sync.

    Args:
        nbytes: payload sent or received, without frames for the engine on a trainer's device.
        peak_staging_bytes: largest memory of the rank's buffers.
        seconds: durations by stage: ``agree`` (on the version), ``verify`` (checksums),
            ``transfer`` (waiting for others, unpacking frames) and ``commit``; ``pack`` of senders
            (copies out of parameters), ``load`` of receivers (into the engine's layers).
    """

    version: int
    nbytes: int = 0
    messages: int = 0
    peak_staging_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Adds the time of the block to a stage, less what the block adds to other stages."""
        start = perf_counter()
        inner = sum(self.seconds.values())
        try:
            yield
        finally:
            inner = sum(self.seconds.values()) - inner
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start - inner


CONNECTING = ("connect/start", "connect/done")
"""The places of a connection's ranks before the first sync."""


def sync_places(number: int) -> tuple[str, str, str]:
    """Returns the places of a connection's sync, numbered from 1: agreed, ready, done."""
    return f"{number}/agreed", f"{number}/ready", f"{number}/done"


_GO = "go"

_STORE_TIMEOUT = timedelta(seconds=60)
"""Of connecting to the store, which exists before the ranks start."""


class SyncBarrier:
    """One rank's barriers in a store that all ranks share, with abort.

    A place is a key prefix at which the ranks meet once. The first rank to decide sets its verdict:
    the last rank to arrive lets all continue; a rank that fails or waits too long aborts. Ranks
    wait in the store without polling.

    Attributes:
        ahead: the place of the next meeting.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.ahead = ""
        self._store = store
        self._rank = rank
        self._size = size

    def meet(self, place: str, facts: Mapping[str, str] | None = None) -> None:
        """Waits until every rank is at this place, with equal facts; raises SyncError on an abort or a timeout."""
        if facts:
            self._agree(place, facts)
        self._store.set(f"{place}/{self._rank}", "here")
        if self._store.add(f"{place}/count", 1) == self._size:
            self._store.compare_set(_verdict(place), "", _GO)
        try:
            self._store.wait([_verdict(place)], timedelta(seconds=self.timeout_s))
        except DistStoreError:
            absent = [rank for rank in range(self._size) if not self._store.check([f"{place}/{rank}"])]
            self._decide(place, f"ranks {absent} did not come within {self.timeout_s:g} s")
        self.look(place)

    def look(self, place: str) -> None:
        """Raises SyncError if a rank has aborted at a place; does not wait."""
        if self._store.check([_verdict(place)]):
            verdict = self._store.get(_verdict(place)).decode()
            if verdict != _GO:
                raise SyncError(verdict)

    def look_ahead(self) -> None:
        self.look(self.ahead)

    def abort(self, place: str, reason: str) -> NoReturn:
        """Raises SyncError on all ranks at a place, with the first reason given."""
        raise SyncError(self._decide(place, reason))

    @contextmanager
    def aborting(self, place: str, prefix: str = "") -> Generator[None]:
        """Aborts at a place for an error of the block, of any kind: the others must not wait for this rank."""
        try:
            yield
        except Exception as error:
            self.abort(place, f"{prefix}{error}")

    def forget(self, place: str) -> None:
        """Deletes the keys of a place that all ranks have left."""
        keys = [f"{self._rank}"]
        if self._rank == 0:
            keys += ["count", "facts", "verdict"]
        for key in keys:
            self._store.delete_key(f"{place}/{key}")

    def post(self, key: str, value: str) -> None:
        """Stores a text for other ranks, replacing an earlier one."""
        self._store.set(f"posted/{key}", value)

    def read(self, key: str) -> str:
        return self._store.get(f"posted/{key}").decode()

    def _agree(self, place: str, facts: Mapping[str, str]) -> None:
        """Aborts unless the facts of all ranks are equal."""
        mine = "\n".join(facts.values())
        first = self._store.compare_set(f"{place}/facts", "", mine).decode()
        differing: list[str] = []
        for (name, value), other in zip(facts.items(), first.split("\n"), strict=True):
            if value != other:
                differing.append(f"{name} {value} differs from another rank's, {other}")
        if differing:
            self.abort(place, "; ".join(differing))

    def _decide(self, place: str, reason: str) -> str:
        message = f"sync aborted: rank {self._rank}: {reason}"
        verdict = self._store.compare_set(_verdict(place), "", message).decode()
        return message if verdict == _GO else verdict


class BarrierWatch:
    """The driver's view of the barriers of the connection of this name, in the store that `serve_store` started."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store = PrefixStore(name, store)
        self._size = size
        self._syncs = 0
        self._places: Sequence[str] = CONNECTING

    def begin(self) -> None:
        """Turns to the next sync."""
        self._syncs += 1
        self._places = sync_places(self._syncs)

    def absent(self) -> list[int]:
        """Returns the ranks that have not begun the sync, or the connection before the first one."""
        return [rank for rank in range(self._size) if not self._store.check([f"{self._places[0]}/{rank}"])]

    def abort(self, reason: str) -> None:
        """Lets all ranks raise SyncError that wait in a barrier; in a transfer, they see a peer's end."""
        for place in self._places:
            self._store.compare_set(_verdict(place), "", f"sync aborted: {reason}")


def _verdict(place: str) -> str:
    return f"{place}/verdict"


def open_store(host: str, port: int, name: str) -> Store:
    return PrefixStore(name, TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT))


def serve_store(host: str = "127.0.0.1", port: int = 0) -> TCPStore:
    """Starts a store of ranks; it lives as long as the object.

    Args:
        host: address at which alone it listens; the store has no other protection.
        port: port number; 0 for a free one, then in ``.port``.
    """
    # A TCPStore that opens its port listens on all addresses, whatever its host (torch 2.13).
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
