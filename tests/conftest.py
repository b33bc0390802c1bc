"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four warm rank processes; they start with the first test that uses them."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()
