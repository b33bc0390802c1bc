"""Requirements of tests that the machine lacks."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def lacking(reason: str) -> NoReturn:
    """Ends a test that needs what is not installed here: in continuous integration as a failure, elsewhere skipped."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
