"""Transfer plans: copies, messages and buckets; plain data that is sent to the ranks.

Copies and messages are named tuples: a large plan has a million of them, and frozen dataclasses are
slow to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from megarl.weights.shard_map import ITEM_BYTES, Box, TensorInfo


class Boxed(Protocol):
    """Values that are read box by box: a tensor, or what is computed for a box."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, box: Any, /) -> Any: ...


class Copy(NamedTuple):
    """Elements that go from a box of a source parameter to a box of a target parameter.

    Args:
        target_box: box with the extents of ``source_box``, the last two exchanged where transposed;
            the number of leading extents of 1 may differ.
        dtype: dtype of the target; the sender casts.
        transposed: whether exactly one side stores the transpose of the matrix.
    """

    source: str
    source_box: Box
    target: str
    target_box: Box
    dtype: str
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        return self.target_box.size * ITEM_BYTES[self.dtype]

    def arranged(self, values: Any) -> Any:
        """Returns a view of the source box's elements, a tensor or an array, with the axes of the target box."""
        if self.transposed:
            values = values.swapaxes(-2, -1)
        return values.reshape(self.target_box.shape)


class Message(NamedTuple):
    """The elements of the copies, concatenated, that one rank sends another for one of its buckets."""

    sender: int
    receiver: int
    bucket: int
    copies: tuple[Copy, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Target parameters that arrive together, in load order, or a part of one that is larger than a bucket.

    Args:
        nbytes: size, padding included.
        box: part of the only parameter, in row-major order; None for whole parameters.
        last: whether the parameters are complete with this bucket.
    """

    params: tuple[str, ...]
    nbytes: int
    box: Box | None = None
    last: bool = True


@dataclass(frozen=True, kw_only=True)
class SenderPlan:
    """What one rank sends from its local parameters; messages are in order of the receivers' buckets."""

    rank: int
    params: Mapping[str, TensorInfo]
    messages: tuple[Message, ...]

    @property
    def nbytes(self) -> int:
        return sum(message.nbytes for message in self.messages)

    @property
    def copies(self) -> list[Copy]:
        return [copy for message in self.messages for copy in message.copies]


@dataclass(frozen=True, kw_only=True)
class ReceiverPlan:
    """What one rank receives.

    Args:
        params: all local parameters, in the order of the buckets.
        padded: parameters with padding, which is written as zero.
        buckets: buckets in order of arrival.
        messages: messages by bucket, one from each of its senders.
    """

    rank: int
    params: Mapping[str, TensorInfo]
    padded: frozenset[str]
    buckets: tuple[Bucket, ...]
    messages: tuple[tuple[Message, ...], ...]

    @property
    def senders(self) -> set[int]:
        return {message.sender for bucket in self.messages for message in bucket}

    @property
    def nbytes(self) -> int:
        """Payload bytes: the shard without padding, once."""
        return sum(message.nbytes for bucket in self.messages for message in bucket)


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """Who sends which elements to whom: parts by rank, without those that send or receive nothing.

    Args:
        fingerprint: digest of the maps, ranks, nodes and bucket size.
        staging_bytes: size of the largest bucket.
    """

    fingerprint: str
    senders: Mapping[int, SenderPlan]
    receivers: Mapping[int, ReceiverPlan]
    staging_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(receiver.nbytes for receiver in self.receivers.values())

    @property
    def num_messages(self) -> int:
        return sum(len(sender.messages) for sender in self.senders.values())
