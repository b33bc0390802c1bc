"""What the planner decides: copies, messages and buckets; plain data that travels to the ranks.

Copies and messages are named tuples: a large plan has a million of them, and frozen dataclasses are slow to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar

from megarl.weights.shard_map import ITEM_BYTES, Box, TensorInfo


class Array(Protocol):
    """What torch's tensors and numpy's arrays have in common here."""

    def swapaxes(self, axis0: int, axis1: int, /) -> Self: ...

    def reshape(self, shape: tuple[int, ...], /) -> Self: ...


A = TypeVar("A", bound=Array)


class Copy(NamedTuple):
    """Elements that go from a box of a source parameter to a box of a destination parameter.

    Args:
        source, source_box: where they are read.
        target, target_box: where they are written; the same extents, the last two exchanged where transposed, but for
            leading ones of 1, of which the two sides may have different numbers.
        dtype: the destination's: the sender casts, so that the wire carries no more than the destination stores.
        transposed: exactly one of the two sides stores the transpose of a matrix.
    """

    source: str
    source_box: Box
    target: str
    target_box: Box
    dtype: str
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.target_box.size * ITEM_BYTES[self.dtype]

    def arranged(self, values: A) -> A:
        """A view of the source box's elements with the axes of the target box."""
        return (values.swapaxes(-2, -1) if self.transposed else values).reshape(self.target_box.shape)


class Message(NamedTuple):
    """What one rank sends to another for one bucket: the copies' elements one after the other, without padding.

    Args:
        bucket: index of the receiver's bucket.
        nbytes: of the payload.
    """

    sender: int
    receiver: int
    bucket: int
    copies: tuple[Copy, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Destination parameters that arrive together: whole ones, or a part of one that is larger than a bucket.

    Args:
        params: their names, in load order.
        nbytes: of what arrives, padding included.
        box: of the only parameter, where this is a part of it; the parts follow one another in row-major order.
        last: the parameters are whole when this bucket has arrived.
    """

    params: tuple[str, ...]
    nbytes: int
    box: Box | None = None
    last: bool = True


@dataclass(frozen=True, kw_only=True)
class SenderPlan:
    """One rank's sending.

    Args:
        fingerprint: of the plan that it is a part of.
        params: the local parameters that it sends from.
        messages: in order of the receivers' buckets.
        staging_bytes: no bucket of the plan is larger, and so no message.
    """

    rank: int
    fingerprint: str
    params: Mapping[str, TensorInfo]
    messages: tuple[Message, ...]
    staging_bytes: int

    @property
    def nbytes(self) -> int:
        """Payload bytes that the rank sends."""
        return sum(message.nbytes for message in self.messages)


@dataclass(frozen=True, kw_only=True)
class ReceiverPlan:
    """One rank's receiving.

    Args:
        fingerprint: of the plan that it is a part of.
        params: the manifest: every local parameter, in load order, which may begin at any bucket.
        holed: the parameters of which some elements are padding, which are written as zero.
        buckets: in order of their arrival.
        messages: per bucket, one message from each of its senders.
    """

    rank: int
    fingerprint: str
    params: Mapping[str, TensorInfo]
    holed: frozenset[str]
    buckets: tuple[Bucket, ...]
    messages: tuple[tuple[Message, ...], ...]

    @property
    def nbytes(self) -> int:
        """Payload bytes that the rank receives: its shard without padding, once."""
        return sum(message.nbytes for bucket in self.messages for message in bucket)


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """Who sends which elements to whom.

    Args:
        fingerprint: a digest of the maps, ranks, nodes and bucket size that it was made for.
        senders, receivers: by rank; only those with something to send or receive.
        staging_bytes: of the largest bucket, at most the bucket size.
    """

    fingerprint: str
    senders: Mapping[int, SenderPlan]
    receivers: Mapping[int, ReceiverPlan]
    staging_bytes: int

    @property
    def nbytes(self) -> int:
        """Payload bytes over all ranks."""
        return sum(receiver.nbytes for receiver in self.receivers.values())

    @property
    def num_messages(self) -> int:
        return sum(len(sender.messages) for sender in self.senders.values())
