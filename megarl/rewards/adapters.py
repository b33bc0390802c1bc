"""Calls of reward functions in MegaRL's signature, TRL's and verl's, and what they return.

MegaRL's functions take a completion, or with `per: batch` or `group` a list of them. TRL's (1.16,
`GRPOTrainer`) take `prompts`, `completions`, `completion_ids` and every column of the rows, each a
list; a chat's prompt and completion are messages. verl's (0.9, the reward managers `naive` and
`batch`) take `data_source`, `solution_str`, `ground_truth` and `extra_info` of a response, or with
`per: batch` lists in their plurals.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, Literal

import numpy as np

from megarl.config.schema import RewardFunction
from megarl.plugins import Function, check_options
from megarl.rewards.completion import Completion
from megarl.rewards.functions import resolve
from megarl.texts import short_reason

_LARGEST = float(np.finfo(np.float32).max)
_ASYNC_CALLS = 32
"""Calls in progress at once of an async function without `concurrency`."""
_TRL: Final = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
_VERL: Final = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH: Final = tuple(f"{name}s" for name in _VERL)
_VERL_COLUMNS: Final = ("data_source", "reward_model")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a call returned no score: a sentence or a traceback; only the first failure of each kind is reported."""

    kind: str
    reason: str


Reply = float | Failure


@dataclass(frozen=True, kw_only=True)
class CallMode:
    """How many calls of a function may be in progress in a process, and whether these are coroutines."""

    concurrency: int
    is_async: bool

    @property
    def sequential(self) -> bool:
        """Whether the function runs in the main thread, by itself."""
        return self.concurrency == 1 and not self.is_async


class BoundFunction:
    """A reward function with its arguments and its signature; raises ValueError as `functions.resolve` does."""

    def __init__(self, spec: RewardFunction) -> None:
        self._spec = spec
        self._function = resolve(spec.name)
        is_async = inspect.iscoroutinefunction(self._function)
        concurrency = spec.concurrency or (_ASYNC_CALLS if is_async else 1)
        self.mode = CallMode(concurrency=concurrency, is_async=is_async)

    def call(self, completions: Sequence[Completion]) -> Any:
        """Calls the function on one completion, or on a list of them; a coroutine function returns an awaitable."""
        one = self._spec.unit == "response"
        args = self._spec.args
        if self._spec.adapter == "trl":
            return self._function(**{**_trl_arguments(self._function, completions), **args})
        if self._spec.adapter == "verl":
            rows = [_verl_arguments(completion) for completion in completions]
            if one:
                return self._function(**rows[0], **args)
            return self._function(**{f"{name}s": [row[name] for row in rows] for name in _VERL}, **args)
        return self._function(completions[0] if one else list(completions), **args)

    def replies(self, completions: Sequence[Completion]) -> list[Reply]:
        """Calls a plain function; returns a score or a failure for each completion."""
        try:
            return self.read(self.call(completions), len(completions))
        except BaseException as error:  # the user's own code, also that of what it has returned
            return failed(error, len(completions))

    def read(self, value: Any, count: int) -> list[Reply]:
        """Returns the scores in what a call on `count` completions returned, or failures."""
        if self._spec.unit == "response":
            return [self._score(value)]
        kind = type(value).__name__
        what = f"{value!r:.200}, a {kind}"
        if hasattr(value, "tolist"):  # arrays and tensors
            value = value.tolist()
        if isinstance(value, list | tuple):
            if len(value) == count:
                return [self._score(entry) for entry in value]
            what = f"a {kind} of {len(value)}"
        rule = f"it must return a list of {count} number{'s' * (count > 1)}"
        return [Failure(kind=kind, reason=f"it returned {what}: {rule}")] * count

    def _score(self, value: Any) -> Reply:
        """Returns a finite number; a failure for anything else."""
        if self._spec.adapter == "trl" and value is None:
            return 0.0  # as in TRL's sum of the rewards
        if self._spec.adapter == "verl" and isinstance(value, Mapping):
            value = value.get("score")
        if isinstance(value, Real | np.bool_) and abs(float(value)) <= _LARGEST:
            return float(value)
        kind = type(value).__name__
        return Failure(kind=kind, reason=f"it returned {value!r:.200}, a {kind}: it must return one finite number")


def failed(error: BaseException, count: int) -> list[Reply]:
    """Returns the failures of a call on `count` completions, with the traceback in the user's code."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in _FRAMES:
        frames = frames.tb_next
    reason = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return [Failure(kind=type(error).__name__, reason=short_reason(reason))] * count


_FRAMES = (__name__, "megarl.rewards.reward_child")
"""Modules whose frames a traceback does not show."""


def check_signature(spec: RewardFunction, function: Function) -> None:
    """Checks that a function accepts the calls of its adapter; raises ValueError with its signature."""
    if spec.adapter is None:
        check_options(function, spec.args, name=spec.name, positional=1)
        return
    given = _VERL if spec.unit == "response" else _VERL_BATCH
    if spec.adapter == "trl":
        accepted = [name for name in _TRL if _accepts(function, name)]
        given = (*accepted, *required_columns(spec, function))
    check_options(function, spec.args, name=spec.name, positional=0, given=given)


def likely_adapter(function: Function) -> Literal["trl", "verl"] | None:
    """Returns the system whose parameters a function has; None: neither's."""
    names = {parameter.name for parameter in _parameters(function)}
    if names & {"solution_str", "solution_strs"}:
        return "verl"
    return "trl" if "completions" in names else None


def required_columns(spec: RewardFunction, function: Function) -> tuple[str, ...]:
    """Returns the columns that every row must have for a function with an adapter."""
    if spec.adapter == "verl":
        return _VERL_COLUMNS
    if spec.adapter != "trl":
        return ()
    names: list[str] = []
    for parameter in _parameters(function):
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        known = parameter.name in _TRL or parameter.name in spec.args
        if named and not known and parameter.default is parameter.empty:
            names.append(parameter.name)
    return tuple(names)


def _trl_arguments(function: Function, completions: Sequence[Completion]) -> dict[str, Any]:
    """Returns the arguments of TRL's call that the function accepts."""
    names = dict.fromkeys(name for completion in completions for name in completion.fields)
    arguments: dict[str, Any] = {name: [each.fields.get(name) for each in completions] for name in names}
    prompts: list[Any] = []
    responses: list[Any] = []
    for completion in completions:
        if completion.messages is None:
            prompts.append(completion.prompt)
            responses.append(completion.response)
        else:
            prompts.append(list(completion.messages))
            responses.append([{"role": "assistant", "content": completion.response}])
    arguments |= {
        "prompts": prompts,
        "completions": responses,
        "completion_ids": [list(completion.response_ids) for completion in completions],
        "log_extra": _drop,
        "log_metric": _drop,
    }
    return {name: value for name, value in arguments.items() if _accepts(function, name)}


def _verl_arguments(completion: Completion) -> dict[str, Any]:
    return {
        "data_source": completion.field("data_source"),
        "solution_str": completion.response,
        "ground_truth": completion.field("reward_model")["ground_truth"],
        "extra_info": dict(completion.fields.get("extra_info", {})),
    }


def _drop(*_: object) -> None:
    """Takes what a function of TRL's logs."""


def _accepts(function: Function, name: str) -> bool:
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in _parameters(function))


def _parameters(function: Function) -> Sequence[inspect.Parameter]:
    return tuple(inspect.signature(function).parameters.values())
