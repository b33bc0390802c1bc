"""The child's side of ``process``: calls reward functions as it is told, and says what each call came to."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

import numpy as np

from megarl.config.schema import RewardFunction
from megarl.rewards.answer import Answer
from megarl.rewards.registry import bind

Request = tuple[int, Answer]
"""Which function to call, and with what."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What a call came to that has no score.

    Args:
        kind: alike for failures that are shown once, few words.
        reason: a sentence, or the function's traceback.
    """

    kind: str
    reason: str


Reply = float | Failure
"""A score, or what went wrong."""

_LARGEST = float(np.finfo(np.float32).max)
_PR_SET_PDEATHSIG = 1


def serve(descriptor: int, parent: int) -> None:
    """Gets the functions, says "" where all could be loaded, and answers requests until the parent hangs up.

    Args:
        descriptor: of the connection.
        parent: the process at its other end, with which this one ends, whatever a function is doing then.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.set_inheritable(descriptor, False)  # a program that a function starts must not keep the connection open
    with Connection(descriptor) as connection:
        functions: Sequence[RewardFunction] = connection.recv()
        try:
            bound = [bind(function) for function in functions]
        except ValueError as error:
            connection.send(str(error))
            return
        connection.send("")
        while True:
            try:
                number, answer = connection.recv()
            except EOFError:
                return
            connection.send(reply(bound[number], answer))


def reply(function: Callable[[Answer], Any], answer: Answer) -> Reply:
    """The score of an answer; where the function fails, its traceback, and what it returned that is no score."""
    try:
        value = function(answer)
        if isinstance(value, Real | np.bool_) and abs(float(value)) <= _LARGEST:
            return float(value)
        shown = repr(value)
    except Exception as error:  # the user's own code
        own = error.__traceback__ and error.__traceback__.tb_next
        told = "".join(traceback.format_exception(type(error), error, own)).rstrip()
        return Failure(kind=type(error).__name__, reason=told)
    short = shown if len(shown) <= 200 else f"{shown[:200]}..."
    kind = type(value).__name__
    return Failure(kind=kind, reason=f"it returned {short}, a {kind}: it must return one finite number")
