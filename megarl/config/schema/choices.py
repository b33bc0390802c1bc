"""Fields whose value is one of several named choices with options.

Such a field is ``Annotated[Choice, OneOf(...)]`` with classes of choices, or with kinds of
``megarl.algos.registry``, whose choices are derived from the signatures of functions. A
configuration has a name, or a mapping of it and options; without a name, these are options of the
default choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal, cast, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import core_schema

from megarl.algos.registry import Kind
from megarl.config.schema.base import Section

SHORTHAND: Final = ""
"""The key under which merging files keeps a name to which another file adds options; see ``inheritance``."""

_CUSTOM = "package.module:function"
_DERIVED: Final[dict[str, type[Choice]]] = {}
"""The classes that are derived from signatures, by title."""


class Choice(Section):
    """A named choice; its other fields are its options."""

    name: Any

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the named function."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "name"}


class AlgorithmChoice(Choice):
    """A function of ``megarl/algos``; classes with its options are derived from its signature."""

    model_config = ConfigDict(use_attribute_docstrings=False)  # pydantic would search each class's source

    def __reduce__(self) -> tuple[Any, ...]:
        return _derived_choice, (type(self).__name__,), self.__getstate__()


def _check_function_name(name: str) -> str:
    if re.fullmatch(r"\w+(\.\w+)*:\w+", name) is None:
        raise ValueError(f"should be a function, written as {_CUSTOM}")
    return name


class CustomFunction(Choice):
    """A function of your own."""

    name: Annotated[str, AfterValidator(_check_function_name)]
    """The function, as package.module:function; importable from the working directory."""
    args: Mapping[str, Any] = {}
    """Keyword arguments for the function."""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.args)


class OneOf:
    """The choices of a field, for an annotated type.

    Args:
        parts: classes of choices, or kinds of algorithms.
        default: choice of a mapping without a name; None if it must have one.
    """

    def __init__(self, *parts: type[Choice] | Kind[Any], default: str | None = None) -> None:
        self.table: dict[str, type[Choice]] = {}
        self._default = default
        for part in parts:
            for member in _members(part):
                self.table |= dict.fromkeys(names_of(member), member)

    def __call__(self, name: str, **options: Any) -> Choice:
        """Returns a choice with options."""
        return self.table[name].model_validate({"name": name, **options})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        schemas = {name: handler.generate_schema(member) for name, member in self.table.items()}
        union = core_schema.tagged_union_schema(schemas, discriminator=_tag)
        given = partial(with_shorthand, key="name", default=self._default)
        return core_schema.no_info_before_validator_function(given, union)


def with_shorthand(value: object, key: str, default: str | None = None) -> object:
    """Returns the fields of a section, with a text or the default as that of a key."""
    if isinstance(value, str):
        return {key: value}
    if not isinstance(value, Mapping):
        return value
    given = dict(cast(Mapping[object, object], value))
    text = given.pop(SHORTHAND, default)
    if text is None:
        return given
    return {key: text, **given}


def names_of(choice: type[BaseModel]) -> tuple[str, ...]:
    """Returns the names of a choice; of custom functions, their form."""
    return get_args(choice.model_fields["name"].annotation) or (_CUSTOM,)


def _members(part: type[Choice] | Kind[Any]) -> Iterator[type[Choice]]:
    """Yields a class of choices itself, or a derived one for each function of a kind, which may have several names."""
    if not isinstance(part, Kind):
        yield part
        return
    names: dict[str, list[str]] = {}
    for name, function in part.functions.items():
        names.setdefault(function, []).append(name)
    for same in names.values():
        yield _derive(part, same)


def _derive(kind: Kind[Any], names: list[str]) -> type[Choice]:
    """Returns the choice of a function, with the options, bounds and defaults of its signature."""
    signature = kind.signature(names[0])
    title = f"{kind.title}: {', '.join(names)}"
    fields: dict[str, Any] = {"name": (cast(Any, Literal)[tuple(names)], names[0])}
    for option, parameter in signature.options.items():
        fields[option] = (parameter.type, Field(default=parameter.default, description=parameter.meaning))
    derived = create_model(title, __base__=AlgorithmChoice, __doc__=signature.summary, __module__=__name__, **fields)
    _DERIVED[title] = derived
    return derived


def _derived_choice(title: str) -> Choice:
    """Makes an empty choice of a derived class, which pickle fills."""
    return _DERIVED[title].__new__(_DERIVED[title])


def _tag(value: object) -> str | None:
    """Returns the entry of the table for a value; None if it has no name."""
    name = getattr(value, "name", None)
    if isinstance(value, Mapping):
        name = cast(Mapping[object, object], value).get("name")
    if name is None:
        return None
    return _CUSTOM if ":" in str(name) else str(name)
