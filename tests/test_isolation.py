"""What a user and the machine keep does not change what `make unit` finds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FILES = ("tests/rewards/test_documents.py", "tests/algos/test_reference.py", "tests/sort_letters/test_main.py")
"""Those that import modules of the documents' names, or draw."""


@pytest.mark.process
def test_modules_of_the_user_and_a_missing_font_cache_change_nothing(tmp_path: Path) -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    names = {name for page in pages for name in re.findall(r"\bmy_\w+(?=\.py|:\w)", page.read_text(encoding="utf-8"))}
    assert {"my_rewards", "my_losses", "my_advantages"} <= names
    for name in names:
        (tmp_path / f"{name}.py").write_text("raise AssertionError('a module of the user')")
    unit = ("-p", "no:cacheprovider", "--hypothesis-profile=unit", "-m", "not (process or dist or e2e or gpu)")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "MPLCONFIGDIR": str(tmp_path / "fonts")}
    command = [sys.executable, "-m", "pytest", *unit, *FILES]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
