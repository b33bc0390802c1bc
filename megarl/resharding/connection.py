"""What joins one rank to the others: the board, small messages, frames, and the landing memory of others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)

from megarl.resharding.board import Board, open_store
from megarl.resharding.landing import Mappings
from megarl.resharding.spec import SyncSpec
from megarl.resharding.transport import GlooTransport, NcclTransport, Transport


@dataclass(kw_only=True)
class Connection:
    """One rank's end.

    Args:
        spec: with this rank's parts.
        rank: of how many others.
        device: of parameters, frames and landing memory.
        board: where all meet.
        control: carries small messages: Gloo on every device, so that a rank that is gone is noticed.
        wire: carries frames; None where this rank has none.
        mapped: other processes' landing memory, by receiver.
        put: payload bytes that this rank has written into others' memory, by receiver.
    """

    spec: SyncSpec
    rank: int
    device: torch.device
    board: Board
    control: Transport
    wire: Transport | None
    mapped: Mappings
    put: Counter[int] = field(default_factory=Counter)

    @property
    def connected(self) -> bool:
        """Whether a sync is possible: not after ``abort`` or ``close``."""
        return self.control.connected

    def settle(self) -> None:
        """Waits until what has been started on the device is done: another process will look at it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def abort(self) -> None:
        """Breaks the connection, so that every transfer fails, here and at the peers, at once."""
        for transport in self._transports():
            transport.abort()
        self.mapped.rest()

    def close(self) -> None:
        """Ends the connection; nothing may be under way."""
        for transport in self._transports():
            transport.close()
        self.mapped.close()

    def _transports(self) -> list[Transport]:
        return [transport for transport in (self.control, self.wire) if transport is not None]


def connect(spec: SyncSpec, rank: int, device: torch.device | str = "cpu") -> Connection:
    """Joins a rank to the others of a sync; waits for all of them.

    Args:
        spec: with this rank's parts.
        rank: in the sync.
        device: of this process.

    Raises:
        SyncError: some rank did not come, follows another plan, or could not use the network.
    """
    device = torch.device(device)
    store = open_store(spec.host, spec.port, spec.name)
    board = Board(store, rank, spec.world_size, spec.timeout_s)
    board.meet("connect/start", {"plan": spec.fingerprint, "verify": f"{spec.verify}"})
    board.ahead = "connect/done"
    wire: Transport | None = None
    try:
        members, peers = range(spec.world_size), spec.peers(rank)
        control = GlooTransport(PrefixStore("control", store), members, rank, peers, spec.timeout_s)
        if rank in spec.wire:
            frames = PrefixStore("wire", store)
            if device.type == "cpu":
                wire = GlooTransport(frames, spec.wire, rank, spec.wire_peers(rank), spec.timeout_s)
            else:
                wire = NcclTransport(
                    frames,
                    spec.wire,
                    rank,
                    to=spec.framed_to(rank),
                    from_=spec.framed_from(rank),
                    device=device,
                    timeout_s=spec.timeout_s,
                    look=board.look_ahead,
                )
    except RuntimeError as error:
        board.abort("connect/done", f"could not connect: {error}")
    board.meet("connect/done")
    return Connection(
        spec=spec,
        rank=rank,
        device=device,
        board=board,
        control=control,
        wire=wire,
        mapped=Mappings(device),
    )
