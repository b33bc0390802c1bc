"""The spans of a process are reported once, in order and without gaps."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from megarl.cluster.calls import CallMonitor
from megarl.cluster.session import Session
from megarl.cluster.spans import WAIT, Span, SpanLog
from megarl.cluster.workers import WorkerGroup
from megarl.config.schema import TimeLimits
from tests.cluster.fakes import FakeStepper, FakeWorker

Reported = list[tuple[str, str, Span]]


def made(spans: SpanLog) -> list[tuple[str, float, float]]:
    """Names, times since the log's beginning and durations, in milliseconds."""
    epoch: float = spans._epoch
    return [
        (span.name, round(1e3 * (span.start - epoch), 2), round(1e3 * (span.end - span.start), 2))
        for span in spans.take()
    ]


def test_adjacent_calls_are_one_span_and_gaps_are_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 1.0)
    spans = SpanLog()
    spans.add("generate", 1.002, 1.005)
    spans.add("generate", 1.00501, 1.007)
    assert made(spans) == [(WAIT, 1000, 2)], "the last span goes on"
    spans.add("generate", 1.010, 1.011)
    spans.add("receive", 1.011, 1.01105)
    spans.close()
    assert made(spans) == [
        ("generate", 1002, 5),
        (WAIT, 1007, 3),
        ("generate", 1010, 1),
    ], "what takes 0.05 ms is left out"
    assert not spans.take()


@pytest.fixture
def reported(session: Session) -> Reported:
    """The spans that the driver gets from the processes of a test."""
    found: Reported = []
    session.monitor = CallMonitor(TimeLimits())
    session.monitor.observer = lambda process, group, spans: found.extend((process, group, span) for span in spans)
    return found


def assert_in_order(spans: list[Span]) -> None:
    for before, after in itertools.pairwise(spans):
        assert before.end <= after.start <= before.end + 2e-4


@pytest.mark.process
async def test_a_worker_returns_its_spans_with_its_results(session: Session, reported: Reported, config: Any) -> None:
    process = session.launch("train rank 0", partial(FakeWorker, config, "train", 0), [0])
    worker = WorkerGroup(session, "train", [process]).named("actor")
    call = worker.call(FakeWorker.note, "a", 0.05)
    await call
    await worker.call(FakeWorker.note, "b", 0.02)
    assert {(process, group) for process, group, _ in reported} == {("train rank 0", "actor")}
    spans = [span for _, _, span in reported]
    assert_in_order(spans)
    assert [span.name for span in spans if span.name != WAIT] == ["note", "note"]
    first, second = [span.end - span.start for span in spans if span.name != WAIT]
    assert first == pytest.approx(await call.longest(), abs=1e-6)
    assert 0.02 <= second < first


@pytest.mark.process
async def test_engine_steps_are_recorded_under_their_request(session: Session, reported: Reported) -> None:
    process = session.launch("engine", partial(FakeStepper, 0.02), [0])
    stepper = WorkerGroup(session, "rollout", [process])
    work = stepper.call(FakeStepper.work, 20)
    await stepper.call(FakeStepper.noted)
    await work
    await stepper.call(FakeStepper.noted)
    spans = [span for _, _, span in reported if span.name not in (WAIT, "noted")]
    assert {span.name for span in spans} == {"work"}
    assert 20 * 0.02 <= sum(span.end - span.start for span in spans) <= spans[-1].end - spans[0].start
    assert_in_order([span for _, _, span in reported])
