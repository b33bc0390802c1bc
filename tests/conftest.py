"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.pool import RankPool

# Reproducible, and without a time limit per example: the machine may be busy.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the files with whole runs after all others, those without the warm processes last."""
    whole = {item.path for item in items if item.get_closest_marker("e2e")}
    alone = {item.path for item in items if _is_alone(item)}
    items.sort(key=lambda item: (item.path in whole, item.path in alone))


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four warm rank processes; they start with the first test that uses them."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def whole_machine(request: pytest.FixtureRequest, pool: RankPool) -> None:
    """Ends the warm processes before a whole run: idle, they take a quarter of a core, as Gloo polls."""
    if _is_alone(request.node):
        pool.close()


def _is_alone(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("e2e")) and not item.get_closest_marker("dist")
