"""What the agents of a job tell each other."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class Start:
    """To every node, once all are there: start Ray.

    Args:
        ray_address: host and port of Ray's head.
        log_dir: of this attempt of the job, absolute.
        devices: of each node.
        on_gpus: what a device is: a GPU, or a virtual slot.
        object_store_mib: shared memory of each node.
    """

    ray_address: str
    log_dir: str
    devices: int
    on_gpus: bool
    object_store_mib: int


@dataclass(frozen=True, kw_only=True)
class Lost:
    """To the head: this node ends.

    Args:
        reason: why.
        exit_code: that the job is to have.
    """

    reason: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class End:
    """To every node: the job is at its end.

    Args:
        failed: whether something has failed in it: Ray's logs are kept.
    """

    failed: bool


Message = Start | Lost | End

_KINDS: Final[dict[str, type[Message]]] = {"start": Start, "lost": Lost, "end": End}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


def encoded(message: Message) -> dict[str, Any]:
    """As what JSON knows."""
    return {_NAMES[type(message)]: asdict(message)}


def decoded(fields: dict[str, Any]) -> Message:
    """The message."""
    ((name, values),) = fields.items()
    return _KINDS[name](**values)
