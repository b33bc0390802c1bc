"""The functions of Ray that are used, with types: its own annotations are incomplete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import RayTaskError
from ray.util.placement_group import PlacementGroup

T = TypeVar("T")
_ray: Any = ray


def init(**options: Any) -> None:
    """Starts or joins Ray."""
    _ray.init(**options)


def shutdown() -> None:
    """Ends or leaves it."""
    _ray.shutdown()


def remote(cls: type[Any]) -> Any:
    """The actor class of a class."""
    return _ray.remote(cls)


def put(value: T) -> ObjectRef[T]:
    """Puts a value where every process can read it, as long as somebody has the reference."""
    return _ray.put(value)


def get(ref: ObjectRef[T]) -> T:
    """The value of a reference.

    Raises:
        RayError: the call that was to make it has failed.
    """
    return _ray.get(ref)


def wait(refs: Sequence[ObjectRef[Any]], *, count: int, timeout: float) -> list[ObjectRef[Any]]:
    """The references that have a value or a failure; waits for ``count`` of them, ``timeout`` seconds at most."""
    ready, _ = _ray.wait(list(refs), num_returns=count, timeout=timeout)
    return ready


def raised(error: RayTaskError) -> object:
    """What a method raised in its process."""
    untyped: Any = error
    return untyped.cause


def node_address() -> str:
    """The address of this node."""
    return _ray.util.get_node_ip_address()


def living_nodes() -> list[Mapping[str, Any]]:
    """Ray's records of the nodes of the cluster."""
    return [node for node in _ray.nodes() if node["Alive"]]


def free_resources() -> Mapping[str, float]:
    """Of all nodes together, by name."""
    return _ray.available_resources()


def nodes_of(group: PlacementGroup) -> dict[int, str]:
    """The node of each bundle."""
    return _ray.util.placement_group_table(group)["bundles_to_node_id"]
