"""Health checks of a training run, from the lines of metrics.jsonl alone; the limits are those of docs/metrics.md.

A check says of each step whether it is unhealthy. Its finding begins after some unhealthy steps in
a row, or at once after one far beyond the limit, and ends after as many steps that are healthy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final

from megarl.run.display import short
from megarl.run.paths import field_at
from megarl.texts import counted

Line = Mapping[str, Any]
Lines = Sequence[Line]
"""The last lines of metrics.jsonl, WINDOW at most."""

Limits = Mapping[Any, float | None]
"""Limits of healthy values by metric, in place of the usual ones; None is none."""

WINDOW: Final = 50
_UNSCORED = "rewards/unscored"
_SKIPPED = "/skipped"
_SHOWN = 4
_QUIET = 5
"""The fewest healthy steps that end a finding: one that comes and goes is reported once."""


def _never(_: Line) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Check:
    """A rule for the last steps of a run.

    Args:
        metric: metric of the rule, or a name of the rule.
        limit: bound of healthy values, in place of `find`.
        is_lower: whether the limit is the lowest healthy value, not the highest.
        unless: whether the limit is not meant for a line.
        factor_at_once: multiple of the limit that begins a finding in one step.
        find: what is wrong with the last line; empty if nothing is, None if it lacks the metric.
        steps: unhealthy steps in a row that begin a finding, and healthy ones that end it.
        harmful: whether the policy may be destroyed, not only badly taught.
    """

    metric: str
    advice: str
    limit: float | None = None
    is_lower: bool = False
    unless: Callable[[Line], bool] = _never
    factor_at_once: float | None = None
    find: Callable[[Lines], str | None] | None = None
    steps: int = 1
    harmful: bool = False

    def problem(self, lines: Lines) -> str | None:
        """Says what is wrong with the last line, as `find` does."""
        if self.find is not None:
            return self.find(lines)
        value = lines[-1].get(self.metric)
        if value is None or self.limit is None or self.unless(lines[-1]):
            return None
        unhealthy = value > self.limit
        side = "above"
        if self.is_lower:
            unhealthy = value < self.limit
            side = "below"
        return f"{self.metric} is {short(value)}, {side} {self.limit:g}" if unhealthy else ""

    def is_far_beyond(self, line: Line) -> bool:
        """Whether an unhealthy line begins a finding by itself."""
        if self.limit is None or self.factor_at_once is None:
            return False
        return line[self.metric] > self.factor_at_once * self.limit


def metric_values(lines: Lines, metric: str) -> list[float]:
    """Returns the finite values of a metric."""
    return [line[metric] for line in lines if line.get(metric) is not None]


_EARLIER = 20
_JUMP = 10.0


def _jump(metric: str, *, least: float) -> Callable[[Lines], str | None]:
    """Finds ten times the median of the last 20 values before, 5 at least; `least` is healthy."""

    def find(lines: Lines) -> str | None:
        fresh = [line for line in lines if not line.get("staleness/max")]  # older samples differ anyway
        value = lines[-1].get(metric)
        if value is None or lines[-1].get("staleness/max"):
            return None
        earlier = metric_values(fresh[:-1], metric)[-_EARLIER:]
        if len(earlier) < 5 or value <= max(least, _JUMP * median(earlier)):
            return ""
        return f"{metric} is {short(value)}, more than {_JUMP:g} times that of the steps before"

    return find


def _gradient_jump(role: str) -> Check:
    metric = f"{role}/grad_norm"
    advice = "look for instability in the next steps; lower the learning rate or clip_grad"
    return Check(metric=metric, find=_jump(metric, least=1e-5), advice=advice)


_SCORE = "objective/score"
_AVERAGED = 5  # steps


def _score_fell(lines: Lines) -> str | None:
    scores = metric_values(lines, _SCORE)
    if lines[-1].get(_SCORE) is None or len(scores) < 2 * _AVERAGED:
        return None
    averages = [fmean(scores[end - _AVERAGED : end]) for end in range(_AVERAGED, len(scores) + 1)]
    # The standard deviation of a step's value around the trend, from the mean absolute change.
    noise = fmean(abs(b - a) for a, b in pairwise(scores)) / 1.128
    if max(averages) - averages[-1] <= 4 * noise:
        return ""
    return f"{_SCORE} is {short(scores[-1])}, far below its best {_AVERAGED} steps"


def _unscored(lines: Lines) -> str | None:
    line = lines[-1]
    total = line.get(_UNSCORED)
    if not total:
        return None if total is None else ""
    counts: list[str] = []
    for name, count in line.items():
        if name.startswith(f"{_UNSCORED}/") and count:
            counts.append(f"{name.removeprefix(f'{_UNSCORED}/')}: {count}")
    sampled = counted(line.get("rollout/samples", 0), "response")
    return f"{total} of {sampled} have no score ({', '.join(counts)})"


def _not_finite(lines: Lines) -> str:
    names = [name for name, value in lines[-1].items() if value is None]
    return f"not a finite number: {shortened(names)}" if names else ""


def _skipped(lines: Lines) -> str:
    roles = skipped_roles(lines[-1])
    return f"updates were skipped ({', '.join(roles)})" if roles else ""


def shortened(names: Sequence[str]) -> str:
    """Returns the first names and the number of the others."""
    text = ", ".join(names[:_SHOWN])
    if len(names) > _SHOWN:
        text += f" and {len(names) - _SHOWN} more"
    return text


def skipped_roles(line: Line) -> list[str]:
    """Returns the roles, as in the names of metrics, that skipped optimizer steps."""
    return [name.removesuffix(_SKIPPED) for name, value in line.items() if name.endswith(_SKIPPED) and value]


def _against_engines(line: Line) -> bool:
    """Whether ratios compare the policy with older engines: the trainer has not computed log-probabilities anew."""
    return bool(line.get("staleness/max")) and "rollout/logprob_gap" not in line


def nothing_scores(line: Line) -> bool:
    """Whether nothing scores: the reference is a teacher, from which the policy may begin far away."""
    return _SCORE not in line


def _clips_by_design(line: Line) -> bool:
    """Whether ratios are of sequences: their clip range is so narrow that many tokens are clipped."""
    return "policy/sequence_ratio" in line or _against_engines(line)


_LEARNING_RATE = "lower actor.optimizer.lr"

CHECKS: Final[Sequence[Check]] = (
    Check(
        metric=_UNSCORED,
        find=_unscored,
        advice="they train nothing; the first failure of each kind of each function is printed above",
    ),
    Check(
        metric="not finite",
        find=_not_finite,
        advice=f"{_LEARNING_RATE}, or look for a reward or a model that overflows",
        harmful=True,
    ),
    Check(
        metric="skipped",
        find=_skipped,
        advice="their losses or gradients were not finite; several in a row end the run. Lower the learning rate",
        harmful=True,
    ),
    Check(
        metric="policy/approxkl",
        limit=0.05,
        factor_at_once=5.0,
        unless=_against_engines,
        advice=f"the updates of a step move the policy too far; {_LEARNING_RATE} or algo.ppo_epochs",
        steps=3,
        harmful=True,
    ),
    Check(
        metric="policy/clipfrac",
        limit=0.3,
        unless=_clips_by_design,
        advice=f"the updates are too large for the clip range; {_LEARNING_RATE}, or the optimizer steps of a step",
        steps=3,
        harmful=True,
    ),
    Check(
        metric="objective/kl_per_token",
        limit=1.0,
        unless=nothing_scores,
        advice=f"the policy is far from the reference; {_LEARNING_RATE} or raise algo.kl.coef, and read samples.jsonl",
        steps=3,
        harmful=True,
    ),
    Check(
        metric="policy/entropy",
        limit=0.02,
        is_lower=True,
        advice="all responses to a prompt are alike; lower the learning rate, or raise algo.entropy_coef",
        steps=3,
        harmful=True,
    ),
    Check(
        metric="truncated_fraction",
        limit=0.2,
        advice="a limit, such as rollout.max_new_tokens, is too short, or the model does not end its responses; "
        "read samples.jsonl, and of conversations environment/truncated/LIMIT",
        steps=3,
    ),
    Check(
        metric="group/zero_std_fraction",
        limit=0.8,
        advice="most prompts teach nothing: all their responses have the same score; choose prompts that are neither "
        "too easy nor too hard, or set algo.filter",
        steps=5,
    ),
    *map(_gradient_jump, ("policy", "value", "sft", "dpo", "reward_model")),
    Check(
        metric="rollout/logprob_gap",
        find=_jump("rollout/logprob_gap", least=1e-3),
        advice="trainers and engines have different weights; end the run, and report it",
        harmful=True,
    ),
    Check(
        metric="value/explained_variance",
        limit=0.0,
        is_lower=True,
        advice="the critic predicts worse than a constant; raise critic.optimizer.lr, or train the critic first",
        steps=10,
    ),
    Check(
        metric=_SCORE,
        find=_score_fell,
        advice=f"the policy gets worse; {_LEARNING_RATE}, and read samples.jsonl",
        steps=2,
        harmful=True,
    ),
)
"""All checks. Rows of one metric are next to the lines of its table in docs/metrics.md."""


def limited_checks(limits: Limits) -> list[Check]:
    """Returns all checks, with other limits of some metrics, and one for each of the other metrics with a limit."""
    added = dict(limits)
    checks: list[Check] = []
    for check in CHECKS:
        if check.limit is None or check.metric not in limits:
            checks.append(check)
        else:
            given = replace(check, limit=added.pop(check.metric))
            if check.unless is nothing_scores:  # a limit of the user's is meant for a teacher, too
                given = replace(given, unless=_never)
            checks.append(given)
    for metric, limit in added.items():
        advice = "see health.limits"
        checks.append(Check(metric=metric, limit=limit, advice=advice, steps=3, harmful=True))
    return checks


def health_limits(fields: Mapping[str, Any]) -> Limits:
    """Returns the limits in the fields of a run's configuration, whose checks may be older."""
    limits = field_at(fields, "health.limits")
    if not isinstance(limits, Mapping):
        return {}
    return {name: limit for name, limit in limits.items() if isinstance(limit, int | float | None)}


def shown_limits(limits: Limits) -> dict[str, str]:
    """Returns the limits of healthy values by metric, as short as in the header of a table."""
    shown: dict[str, str] = {}
    for check in limited_checks(limits):
        if check.limit is not None:
            shown[check.metric] = f"{'>' if check.is_lower else '<'} {check.limit:g}"
    return shown


@dataclass(kw_only=True)
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


class HealthMonitor:
    """Applies all checks to a run's lines, in order; `findings` are those that began."""

    def __init__(self, lines: Lines = (), limits: Limits | None = None) -> None:
        self.findings: list[HealthFinding] = []
        self._lines = deque[Line](maxlen=WINDOW)
        self._watches = [_Watch(check=check) for check in limited_checks(limits or {})]
        for line in lines:
            self.add(line)

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
            if text:
                messages.append(f"step {line['step']}: {text}")
        return messages

    def _apply(self, watch: _Watch, lines: Lines) -> str:
        check = watch.check
        step = lines[-1]["step"]
        problem = check.problem(lines)
        if problem is None:
            return ""
        if problem:
            watch.bad += 1
            watch.good = 0
        else:
            watch.bad = 0
            watch.good += 1
        finding = watch.finding
        if finding is None and problem and (watch.bad >= check.steps or check.is_far_beyond(lines[-1])):
            watch.finding = HealthFinding(check=check, first=step, problem=problem)
            self.findings.append(watch.finding)
            return watch.finding.text
        if finding is not None and watch.good >= max(check.steps, _QUIET):
            last = step - watch.good
            finding.last = last
            watch.finding = None
            return f"healthy again: {check.metric}, since step {last + 1}"
        return ""
