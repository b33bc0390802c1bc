"""Fixtures that all tests share."""

from __future__ import annotations

import multiprocessing.util
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.pool import RankPool

# Reproducible, and without a time limit per example: the machine may be busy.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

# Made now: one made in the time of a session would be in the session's directory, and gone when Python removes it.
multiprocessing.util.get_temp_dir()


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four warm rank processes; they start with the first test that uses them."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()
