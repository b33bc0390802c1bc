"""Alternatives by name, each with options of its own, and functions of the user's own among them.

A table of alternatives is ``Annotated[One | Other | Own, Chosen(One)]``. A configuration gives a name alone, or a
mapping of the name and options; a mapping without a name means the table's usual choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, cast, get_args

from pydantic import AfterValidator, BaseModel, GetCoreSchemaHandler
from pydantic_core import core_schema

from megarl.config.schema.base import Section

SHORTHAND: Final = ""
"""The key under which merging files keeps a text that options are then added to; see ``files``."""

_OWN = "package.module:function"


class Choice(Section):
    """An alternative. The field ``name`` has its names, the other fields are its options."""

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the function that the name stands for."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "name"}


def _of_a_module(name: str) -> str:
    if re.fullmatch(r"\w+(\.\w+)*:\w+", name) is None:
        raise ValueError(f"should be a function, written as {_OWN}")
    return name


class Own(Choice):
    """A function of your own."""

    name: Annotated[str, AfterValidator(_of_a_module)]
    """The function, as package.module:function; importable from the working directory."""
    args: Mapping[str, Any] = {}
    """Keyword arguments for the function."""

    @property
    def options(self) -> dict[str, Any]:
        """The arguments."""
        return dict(self.args)


class Chosen:
    """Marks a union of choices, in an annotated type.

    Args:
        usual: the choice that a mapping without a name is for; None where it must have one.
    """

    def __init__(self, usual: type[Choice] | None = None) -> None:
        self._usual = None if usual is None else names_of(usual)[0]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        table = table_of(get_args(source))
        union = core_schema.tagged_union_schema(
            {name: handler.generate_schema(member) for name, member in table.items()}, discriminator=_tag
        )
        return core_schema.no_info_before_validator_function(self._as_mapping, union)

    def _as_mapping(self, value: object) -> object:
        """A name alone is a choice without options."""
        if isinstance(value, str):
            return {"name": value}
        if not isinstance(value, Mapping):
            return value
        given = dict(cast(Mapping[object, object], value))
        name = given.pop(SHORTHAND, self._usual)
        return given if name is None else {"name": name, **given}


def names_of(choice: type[BaseModel]) -> tuple[str, ...]:
    """The names that a choice goes by; of functions of the user's own, what they look like."""
    return get_args(choice.model_fields["name"].annotation) or (_OWN,)


def table_of(members: Sequence[type[BaseModel]]) -> dict[str, type[BaseModel]]:
    """The choices of a union by name."""
    return {name: member for member in members for name in names_of(member)}


def _tag(value: object) -> str | None:
    """Under which name of the table a value stands; None where it has no name."""
    if isinstance(value, Mapping):
        name = cast(Mapping[object, object], value).get("name")
    else:
        name = getattr(value, "name", None)
    return None if name is None else _OWN if ":" in str(name) else str(name)
