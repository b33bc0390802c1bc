"""The page that compares defaults agrees with the schema."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config.schema.schema_walk import choices, fields, section, within
from megarl.stages.ppo.config import PPOConfig
from tests.config.debug import REPOSITORY

PAGE = (REPOSITORY / "docs" / "defaults.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in row.split("|")[1:-1]] for row in PAGE.splitlines() if row.startswith("| `")]


def field(path: str) -> FieldInfo:
    here: Any = PPOConfig
    *above, last = path.split(".")
    for part in above:
        here = within(here, part)
    owner = choices(here)["ppo"] if choices(here) else section(here)
    assert owner is not None
    return fields(owner)[last]


def text(info: FieldInfo) -> str:
    """A default as it stands on the page."""
    match info.default:
        case _ if info.is_required():
            return "required"
        case bool() | None:
            return {None: "null", True: "true", False: "false"}[info.default]
        case BaseModel():
            return dict(info.default)["name"]
        case tuple():
            return ", ".join(f"{number:g}" for number in info.default)
        case float():
            return f"{info.default:g}".replace("e-0", "e-")
        case _:
            return str(info.default)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_documented_defaults_equal_the_schemas(row: list[str]) -> None:
    setting, told, *others = row
    assert len(others) == 4
    if setting == "`run.epochs`":
        assert field("run.epochs").default is field("run.steps").default is None
    else:
        assert re.sub(r"`|:.*|, `.*", "", told) == text(field(setting.strip("`")))
