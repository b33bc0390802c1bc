"""The debug configuration, as the tests of this folder start from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.config import ConfigError, RunConfig, load

REPOSITORY = Path(__file__).resolve().parents[2]
DEBUG = REPOSITORY / "configs" / "debug" / "ppo.yaml"


def debug(*overrides: str) -> RunConfig:
    """The debug run with overrides."""
    return load(DEBUG, overrides)


def refused(*overrides: str) -> dict[str, str]:
    """The rules that the debug run with overrides breaks, by field."""
    with pytest.raises(ConfigError) as caught:
        load(DEBUG, overrides)
    return by_field(caught.value)


def by_field(error: ConfigError) -> dict[str, str]:
    """The broken rules of an error by field; several of one field in several lines."""
    rules: dict[str, str] = {}
    for problem in error.problems:
        rules[problem.field] = "\n".join(filter(None, (rules.get(problem.field), problem.rule)))
    return rules


def without(group: str, roles: Sequence[str]) -> list[str]:
    """Overrides that remove roles from a group."""
    return [f"groups.{group}.roles.{role}=null" for role in roles]
