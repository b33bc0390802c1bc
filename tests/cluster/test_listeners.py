"""Nobody without the token of a session's Ray gets an answer from its processes, which listen on loopback alone."""

from __future__ import annotations

import os

import pytest

from megarl.cluster.cleanup import MARK, marked_processes
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from tests.cluster.fakes import FakeWorker
from tests.security.listeners import METHODS, assert_closed

pytestmark = pytest.mark.process


async def test_a_session_is_closed_to_others(session: Session, group: WorkerGroup[FakeWorker]) -> None:
    assert await group.call(FakeWorker.note, "here") == [0, 1, 2]
    seen = assert_closed([os.getpid(), *marked_processes(os.environ[MARK])])
    for method in METHODS:
        assert "UNAUTHENTICATED" in seen[method], f"no process has refused {method}"
    assert "401" in seen["HTTP"]
