"""The settings of a run, and those that are not the schema's defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from megarl.config.inheritance import merged, recipes
from megarl.config.schema import STAGES
from megarl.config.short_stages import RECIPES
from megarl.run.compare import flat
from megarl.run.paths import RunPaths, read_config

_REQUIRED: Final = object()


def read_settings(run: RunPaths) -> dict[str, Any]:
    """Returns the settings of a run by path, and the defaults of those that are others: null if there is none.

    `own` is null for a configuration that this version does not accept. Its files need not be on this machine.
    """
    fields = read_config(run.config)
    settings = dict(flat(fields)) if fields else {}
    try:
        own = dict(_own(STAGES[fields["stage"]].model_validate(fields), None)) if fields else {}
    except (KeyError, ValidationError):
        own = None
    return {"settings": settings, "own": own}


def _own(section: BaseModel, base: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields that differ from their defaults, with these; `base` has the section's, if it is of its kind."""
    for name, info in type(section).model_fields.items():
        value, field = getattr(section, name), f"{path}{info.alias or name}"
        if type(base) is type(section):
            default = getattr(base, name)
        else:
            default = _REQUIRED if info.is_required() else info.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            if "name" in type(value).model_fields and getattr(default, "name", None) != getattr(value, "name", None):
                yield f"{field}.name", getattr(default, "name", None)
            yield from _own(value, default, f"{field}.")
        elif isinstance(value, Mapping) and any(isinstance(entry, BaseModel) for entry in value.values()):
            for key, entry in value.items():
                yield from _own(entry, None, f"{field}.{key}.")
        elif default is _REQUIRED or value != default:
            shown = None if default is _REQUIRED or isinstance(default, BaseModel) else default
            yield field, shown if isinstance(shown, int | float | str | bool) else shown and str(shown)


def read_recipes() -> dict[str, dict[str, Any]]:
    """Returns what each recipe sets, by path; a choice that is only named has the path of its name."""
    return {name: dict(flat(merged(RECIPES / f"{name}.yaml", ())[0])) for name in recipes()}
