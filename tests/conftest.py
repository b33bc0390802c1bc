"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.pool import RankPool

# Reproducible, and without a time limit per example: the machine may be busy.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs what is quick first and whole runs last, and keeps together what shares an expensive fixture.

    That is for ``pytest -n 2 --dist loadgroup``, whose two processes take one group after the other.
    """
    of_file: dict[Path, tuple[int, str]] = {}
    for item in items:
        of_file[item.path] = max(of_file.get(item.path, (0, "")), _group(item))
    items.sort(key=lambda item: of_file[item.path])
    for item in items:
        _, name = of_file[item.path]
        item.add_marker(pytest.mark.xdist_group(name))


def _group(item: pytest.Item) -> tuple[int, str]:
    """The group of a test's file, as far as this test knows, and its place; that of the last place counts."""
    folder, file = item.path.parent.name, str(item.path)
    if folder in ("slurm", "rollout"):
        return 3, folder
    if folder in ("launch", "launchers"):
        return 4, file
    if "debug_run" in item.fixturenames:  # pyright: ignore[reportAttributeAccessIssue]
        return 6, "debug run"
    if item.get_closest_marker("dist"):
        return (2 if item.get_closest_marker("e2e") else 1), "ranks"  # who use the warm processes, after one another
    if item.get_closest_marker("e2e"):
        return (5 if item.path.stem == "test_recipes" else 7), file  # the longest one does not come last
    return 0, file


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
