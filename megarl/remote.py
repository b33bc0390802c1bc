"""Methods of worker processes that the driver may call."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Concatenate, Literal, Self, overload

Phase = Literal["start", "rollout", "scoring", "inference", "update", "sync", "checkpoint"]
"""A field of `cluster.time_limits`."""


class RemoteMethod[W, **P, R_co]:
    """A method of the worker class W, with parameters P and result R; on an object it is an ordinary method.

    Args:
        phase: phase whose time limit applies to its calls.
        args: first arguments of every call.
    """

    def __init__(self, function: Callable[..., R_co], phase: Phase, args: tuple[object, ...] = ()) -> None:
        self.__wrapped__ = function
        self.__doc__ = function.__doc__
        self.name: str = function.__name__
        self.phase: Phase = phase
        self.args = args

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(self, instance: W, owner: type[Any]) -> Callable[P, R_co]: ...
    def __get__(self, instance: W | None, owner: type[Any]) -> Self | Callable[P, R_co]:
        return self if instance is None else MethodType(self.__wrapped__, instance)

    def bind[A, **Q, R](self: RemoteMethod[W, Concatenate[A, Q], R], first: A) -> RemoteMethod[W, Q, R]:
        """Returns the method with its first argument fixed."""
        return RemoteMethod(self.__wrapped__, self.phase, (*self.args, first))


def remote[W, **P, R](*, phase: Phase) -> Callable[[Callable[Concatenate[W, P], R]], RemoteMethod[W, P, R]]:
    """Declares a method that the driver may call."""

    def declare(function: Callable[Concatenate[W, P], R]) -> RemoteMethod[W, P, R]:
        return RemoteMethod(function, phase)

    return declare
