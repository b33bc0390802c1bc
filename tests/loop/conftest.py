"""What the simulations of this folder share."""

from __future__ import annotations

import pytest

from megarl.cluster import ray_api
from tests.loop.training import run as run


@pytest.fixture
def references_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no object store."""
    monkeypatch.setattr(ray_api, "get", lambda ref: ref)
    monkeypatch.setattr(ray_api, "put", lambda value: value)
