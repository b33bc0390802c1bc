"""Settings that mean nothing as things are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config.problems import Problem, shown
from megarl.config.schema import Section


def unused(field: str, section: Section, names: Sequence[str], where: str, otherwise: str) -> Iterator[Problem]:
    """Those of a section's fields that were changed, though they have no effect.

    Args:
        field: path of the section.
        names: of its fields that mean nothing.
        where: why, after "has no effect".
        otherwise: what else than to remove them.
    """
    for name in names:
        info = type(section).model_fields[name]
        value: object = getattr(section, name)
        if value != info.default:
            text: object = getattr(value, "name", "given") if isinstance(value, Section) else value
            key = f"{field}.{info.alias or name}"
            rule = f"has no effect {where}"
            yield Problem(field=key, value=shown(text), rule=rule, fix=f"remove it, {otherwise}")
