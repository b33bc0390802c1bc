"""The findings of a run's health checks, from their beginning to their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from megarl.run.health import CHECKS, WINDOW, Check, Limits, Line, Lines, limited_checks


@dataclass(frozen=True, kw_only=True)
class HealthFinding:
    """A time in which a run was unhealthy.

    Args:
        first, last: first and last step; `last` is None while it lasts.
        problem: what was wrong in the first step.
    """

    check: Check
    first: int
    last: int | None = None
    problem: str

    @property
    def text(self) -> str:
        return f"{self.problem}: {self.check.advice}"


@dataclass(kw_only=True)
class _Watch:
    """A check in the course of a run: unhealthy or healthy steps in a row, and the current finding."""

    check: Check
    bad: int = 0
    good: int = 0
    finding: HealthFinding | None = None


@dataclass(kw_only=True)
class HealthMonitor:
    """Applies checks to a run's lines, in order; `findings` are those that began, the last ones may last."""

    checks: Sequence[Check] = CHECKS
    findings: list[HealthFinding] = field(default_factory=list)
    _lines: deque[Line] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _watches: Sequence[_Watch] = field(init=False)

    def __post_init__(self) -> None:
        self._watches = [_Watch(check=check) for check in self.checks]

    def finding_at(self, step: int, metrics: Collection[str]) -> HealthFinding | None:
        """Returns the first finding about one of some metrics that began with a step; None without one."""
        for finding in self.findings:
            if finding.first == step and finding.check.metric in metrics:
                return finding
        return None

    def add(self, line: Line) -> list[str]:
        """Takes the line of the next step; returns a sentence for each finding that begins or ends with it."""
        self._lines.append(line)
        lines = tuple(self._lines)
        messages: list[str] = []
        for watch in self._watches:
            text = self._apply(watch, lines)
            if text is not None:
                messages.append(f"step {line['step']}: {text}")
        return messages

    def _apply(self, watch: _Watch, lines: Lines) -> str | None:
        check = watch.check
        line = lines[-1]
        unhealthy = check.is_unhealthy(lines)
        if unhealthy is None:
            return None
        if unhealthy:
            watch.bad += 1
            watch.good = 0
        else:
            watch.bad = 0
            watch.good += 1
        if watch.finding is None and (watch.bad >= check.steps or check.is_far_beyond(line)):
            watch.finding = HealthFinding(check=check, first=line["step"], problem=check.problem(line))
            self.findings.append(watch.finding)
            return watch.finding.text
        if watch.finding is not None and watch.good >= max(check.steps, _QUIET):
            last = line["step"] - watch.good
            self.findings[self.findings.index(watch.finding)] = replace(watch.finding, last=last)
            watch.finding = None
            return f"healthy again: {check.metric}, since step {last + 1}"
        return None


_QUIET = 5
"""The fewest healthy steps that end a finding: one that comes and goes is reported once."""


def watch(lines: Lines, *more: Check, limits: Limits | None = None) -> HealthMonitor:
    """Returns the monitor of all checks, and of more, after some lines."""
    monitor = HealthMonitor(checks=(*limited_checks(limits or {}), *more))
    for line in lines:
        monitor.add(line)
    return monitor
