"""Methods that the driver may call in another process; each belongs to a phase of the step, which has a time limit."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, overload

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Phase = Literal["start", "rollout", "scoring", "inference", "update", "sync", "checkpoint"]
"""A field of the configuration's time limits."""


class RemoteMethod(Generic[W, P, R_co]):
    """A method of a worker class W, with parameters P and result R; on an object it is an ordinary method.

    Args:
        function: the method.
        phase: what calls of it are part of.
    """

    def __init__(self, function: Callable[Concatenate[W, P], R_co], phase: Phase) -> None:
        self.__wrapped__, self.__doc__ = function, function.__doc__
        self.name: str = function.__name__
        self.phase: Phase = phase

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(self, instance: W, owner: type[Any]) -> Callable[P, R_co]: ...
    def __get__(self, instance: W | None, owner: type[Any]) -> Self | Callable[P, R_co]:
        return self if instance is None else MethodType(self.__wrapped__, instance)


def remote(*, phase: Phase) -> Callable[[Callable[Concatenate[W, P], R]], RemoteMethod[W, P, R]]:
    """Declares a method as one that the driver may call."""

    def declare(function: Callable[Concatenate[W, P], R]) -> RemoteMethod[W, P, R]:
        return RemoteMethod(function, phase)

    return declare
