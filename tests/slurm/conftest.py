"""A Slurm for all tests of this directory; in continuous integration a missing one is a failure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.debian import SLURM, missing
from tests.needs import lacking
from tests.slurm.cluster import Slurm
from tests.slurm.jobs import Launcher


@pytest.fixture(scope="session")
def started() -> Iterator[Slurm]:
    """A running Slurm; it starts with the first test that uses it."""
    if packages := missing(SLURM):
        lacking(f"no Slurm on this machine: make slurm installs {', '.join(packages)}")
    with Slurm() as slurm:
        yield slurm


@pytest.fixture
def slurm(started: Slurm) -> Slurm:
    """The running Slurm with two idle nodes, whatever the test before did to it."""
    started.tidy()
    return started


@pytest.fixture
def launcher(slurm: Slurm, tmp_path: Path) -> Iterator[Launcher]:
    """Submits runs; the test fails if anything of them is left at its end."""
    launcher = Launcher(slurm, tmp_path)
    try:
        yield launcher
        assert list(launcher.left()) == []
    finally:
        slurm.tidy()
        launcher.close()
