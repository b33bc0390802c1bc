"""A stage is its folder and its line in the registry: nobody else names it."""

from __future__ import annotations

import re

import pytest

from megarl.config.schema import STAGES, stage_class
from tests.config.debug import REPOSITORY


@pytest.mark.parametrize("stage", STAGES)
def test_three_files_name_a_stage(stage: str) -> None:
    named = re.compile(rf"\b{stage_class(stage).__name__}\b|megarl\.stages\.{stage}\.config")
    files: list[str] = []
    for file in sorted((REPOSITORY / "megarl").rglob("*.py")):
        if named.search(file.read_text(encoding="utf-8")):
            files.append(str(file.relative_to(REPOSITORY / "megarl")))
    stage_files = [f"stages/{stage}/{name}.py" for name in ("config", "trainer")]
    assert files == sorted(["config/schema/run_config.py", *stage_files])
