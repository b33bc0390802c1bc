"""Functions of the user's own that a configuration names: whether they are there and can be called as they will be."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megarl.config import PPOConfig, Problem, RunConfig
from megarl.config.problems import shown
from megarl.config.schema import Own, Section
from megarl.plugins import check_options, resolve, suggestion

if TYPE_CHECKING:
    from megarl.algos.kinds import Kind


def check_own_functions(config: RunConfig) -> list[Problem]:
    """Imports the functions and holds their arguments against them; runs none of them.

    A machine without torch, from which runs are only launched, leaves that to the run.
    """
    if find_spec("torch") is None:
        return []
    importance = isinstance(config, PPOConfig) and config.algo.kl.importance
    return [problem for field, own in _named(config, "") for problem in _wrong(field, own, importance=importance)]


def _named(section: Section, above: str) -> Iterator[tuple[str, Own]]:
    """Every function of the user's own below a section, with its field."""
    for name, info in type(section).model_fields.items():
        value, field = getattr(section, name), f"{above}{info.alias or name}"
        if isinstance(value, Own):
            yield field, value
        elif isinstance(value, Section):
            yield from _named(value, f"{field}.")


def _wrong(field: str, own: Own, *, importance: bool) -> Iterator[Problem]:
    kind = _kind(field, getattr(own, "level", None))
    try:
        function = resolve(own.name)
    except ValueError as error:
        usual = "name one that can be imported from the working directory; see docs/algorithms.md"
        fix = suggestion(own.name) or usual
        yield Problem(field=f"{field}.name", value=own.name, rule=str(error), fix=fix)
        return
    given = (*kind.arguments, *(name for name, _ in kind.further if importance))
    try:
        check_options(function, own.args, name=own.name, positional=len(given), given=kind.keywords)
    except ValueError as error:
        fix = f"correct them; it is called with ({', '.join(given)}) first; see docs/algorithms.md"
        yield Problem(field=f"{field}.args", value=shown(dict(own.args)), rule=str(error), fix=fix)


def _kind(field: str, level: str | None) -> Kind:
    """What the functions of a field are called with."""
    from megarl.algos.kinds import KINDS  # and with it torch, which a run without such functions does not need yet

    (kind,) = (kind for kind in KINDS if kind.field == field and kind.level == level)
    return kind
