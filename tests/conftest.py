"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from xdist.remote import Producer

from tests.groups import GroupScheduling, group, place
from tests.pool import RankPool

# Reproducible, and without a time limit per example: the machine may be busy.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs what is quick first, and one group after the other; in a group of several folders, whole runs come last."""

    def order(item: pytest.Item) -> tuple[int, str, bool]:
        file = item.path.relative_to(config.rootpath)
        return place(file), group(file), item.path.parent.name == "e2e"

    items.sort(key=order)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    """For ``pytest -n 2 --no-loadscope-reorder``."""
    return GroupScheduling(config, log)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four warm rank processes; they start with the first test that uses them."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def whole_machine(request: pytest.FixtureRequest, pool: RankPool) -> None:
    """Ends the warm processes before a whole run: idle, they take a quarter of a core, as Gloo polls."""
    if request.node.get_closest_marker("e2e") and not request.node.get_closest_marker("dist"):
        pool.close()
