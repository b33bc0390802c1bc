"""Health checks of a training run, from the lines of metrics.jsonl alone; the limits are those of docs/metrics.md.

A check says of each step whether it is unhealthy. Its finding begins after some unhealthy steps in a row, or at once
after one far beyond the limit, and ends after as many steps that are healthy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final

from megarl.run.display import short
from megarl.texts import counted

Line = Mapping[str, Any]
Lines = Sequence[Line]
"""The last lines of metrics.jsonl, at most WINDOW."""

Limits = Mapping[Any, float | None]
"""Limits of healthy values by metric, in place of the usual ones; None is none."""

WINDOW: Final = 50
_SAMPLED = "rollout/samples"
_UNSCORED = "rewards/unscored"
_SKIPPED = "/skipped"
_SHOWN = 4
_TRUNCATED = "environment/truncated"
_LIMITS_OF_CONVERSATIONS: Final[Mapping[str, str]] = {
    "max_new_tokens": "rollout.max_new_tokens, a turn's limit",
    "max_model_len": "rollout.max_model_len, the limit of a whole conversation",
    "max_turns": "environment.max_turns",
    "request": "the limit of tokens in a harness's request",
    "environment": "a limit of the environment",
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """A rule for the last steps of a run.

    Args:
        metric: that the rule is about, or a name of the rule.
        unhealthy: whether the last of some lines is unhealthy; None if it lacks the metric.
        rule: of an unhealthy step, in words, after the metric's value.
        advice: what it means, and what to do.
        steps: unhealthy steps in a row that begin a finding, and healthy ones that end it.
        at_once: whether the last line begins a finding by itself.
        limit: of healthy values, as short as in the header of a table.
        limited: returns the check with another limit.
        harmful: the policy may be destroyed, not only badly taught.
        describe: says what is wrong with a line, instead of value and rule.
    """

    metric: str
    unhealthy: Callable[[Lines], bool | None]
    rule: str = ""
    advice: str
    steps: int = 1
    at_once: Callable[[Lines], bool | None] = lambda _: False
    limit: str = ""
    limited: Callable[[float], Check] | None = None
    harmful: bool = False
    describe: Callable[[Line], str] | None = None

    def problem(self, line: Line) -> str:
        """Says what is wrong with an unhealthy line."""
        if self.describe is not None:
            return self.describe(line)
        return f"{self.metric} is {short(line.get(self.metric))}, {self.rule}"


def _values(lines: Lines, metric: str) -> list[float]:
    """Returns the finite values of a metric."""
    return [line[metric] for line in lines if line.get(metric) is not None]


def _beyond(metric: str, limit: float, *, above: bool = True) -> Callable[[Lines], bool | None]:
    def condition(lines: Lines) -> bool | None:
        value = lines[-1].get(metric)
        if value is None:
            return None
        return value > limit if above else value < limit

    return condition


def _above(
    metric: str,
    limit: float,
    advice: str,
    *,
    steps: int = 3,
    at_once: float = float("inf"),
    harmful: bool = False,
    unless: Callable[[Line], bool] = lambda _: False,
    describe: Callable[[Line], str] | None = None,
) -> Check:
    """Returns a check for values above a limit; `unless` says of a line that the limit is not meant for it.

    Args:
        at_once: how many times the limit begins a finding in one step.
    """
    over = _beyond(metric, limit)
    far_over = _beyond(metric, at_once * limit)
    return Check(
        metric=metric,
        unhealthy=lambda lines: None if unless(lines[-1]) else over(lines),
        rule=f"above {limit:g}",
        advice=advice,
        steps=steps,
        at_once=far_over,
        limit=f"< {limit:g}",
        limited=lambda other: _above(
            metric, other, advice, steps=steps, at_once=at_once, harmful=harmful, unless=unless, describe=describe
        ),
        harmful=harmful,
        describe=describe,
    )


def _below(metric: str, limit: float, advice: str, *, steps: int = 3, harmful: bool = False) -> Check:
    under = _beyond(metric, limit, above=False)
    return Check(
        metric=metric,
        unhealthy=under,
        rule=f"below {limit:g}",
        advice=advice,
        steps=steps,
        limit=f"> {limit:g}",
        limited=lambda other: _below(metric, other, advice, steps=steps, harmful=harmful),
        harmful=harmful,
    )


_EARLIER = 20
_JUMP = 10.0


def _jump(metric: str, advice: str, *, least: float = 0.0, harmful: bool = False) -> Check:
    """Returns a check for values ten times the median of the last 20 before, of which there are 5 at least.

    Args:
        least: smaller values are healthy.
    """

    def condition(lines: Lines) -> bool | None:
        value = lines[-1].get(metric)
        fresh = not lines[-1].get("staleness/max")
        if value is None or not fresh:  # older samples differ anyway
            return None
        earlier = _values([line for line in lines[:-1] if not line.get("staleness/max")], metric)[-_EARLIER:]
        return len(earlier) >= 5 and value > max(least, _JUMP * median(earlier))

    rule = f"more than {_JUMP:g} times that of the steps before"
    return Check(metric=metric, unhealthy=condition, rule=rule, advice=advice, harmful=harmful)


_AVERAGED = 5  # steps


def _averages(values: Sequence[float]) -> list[float]:
    """Returns the means of adjacent values."""
    return [fmean(values[end - _AVERAGED : end]) for end in range(_AVERAGED, len(values) + 1)]


def _noise(values: Sequence[float]) -> float:
    """Returns the standard deviation of a step's value around the trend: the mean absolute change by that of noise."""
    return fmean(abs(b - a) for a, b in pairwise(values)) / 1.128


def _score_fell(lines: Lines) -> bool | None:
    scores = _values(lines, "objective/score")
    if lines[-1].get("objective/score") is None or len(scores) < 2 * _AVERAGED:
        return None
    averages = _averages(scores)
    return max(averages) - averages[-1] > 4 * _noise(scores)


_GROWTH_OVER = 20
_GROWTH = 1.25


def _longer_for_nothing(lines: Lines) -> bool | None:
    """Whether responses grew by a quarter in 20 steps, and the score by less than its noise."""
    last = [line for line in lines if None not in (line.get("response_length/mean"), line.get("objective/score"))]
    last = last[-_GROWTH_OVER:]
    if len(last) < _GROWTH_OVER:
        return None
    lengths, scores = (_averages(_values(last, name)) for name in ("response_length/mean", "objective/score"))
    rose = scores[-1] - scores[0] > _noise(_values(last, "objective/score"))
    return lengths[-1] > _GROWTH * lengths[0] and not rose


def _without_score(line: Line) -> str:
    counts = {name.removeprefix(f"{_UNSCORED}/"): count for name, count in line.items() if f"{_UNSCORED}/" in name}
    by_reward = ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
    return f"{line[_UNSCORED]} of {counted(line.get(_SAMPLED, 0), 'response')} have no score ({by_reward})"


def _not_finite(line: Line) -> list[str]:
    return [name for name, value in line.items() if value is None]


def shortened(names: Sequence[str]) -> str:
    """Returns the first names and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def skipped_roles(line: Line) -> list[str]:
    """Returns the roles, as in the names of metrics, that skipped optimizer steps."""
    return [name.removesuffix(_SKIPPED) for name, value in line.items() if name.endswith(_SKIPPED) and value]


def _against_engines(line: Line) -> bool:
    """Whether ratios compare the policy with older engines: the trainer has not computed log-probabilities anew."""
    return bool(line.get("staleness/max")) and "rollout/logprob_gap" not in line


def _clips_by_design(line: Line) -> bool:
    """Whether ratios are of sequences: their clip range is so narrow that many tokens are clipped."""
    return "policy/sequence_ratio" in line or _against_engines(line)


def _has_conversations(line: Line) -> bool:
    return _TRUNCATED in line


def _limit_of_conversations(line: Line) -> str:
    parts = {name.rpartition("/")[2]: value for name, value in line.items() if name.startswith(f"{_TRUNCATED}/")}
    most = max(parts, key=parts.__getitem__, default="")
    limit = _LIMITS_OF_CONVERSATIONS.get(most, "a limit of the conversation")
    return f"truncated_fraction is {short(line.get('truncated_fraction'))}, mostly by {limit}"


_LEARNING_RATE = "lower actor.optimizer.lr"

CHECKS: Final[Sequence[Check]] = (
    Check(
        metric=_UNSCORED,
        unhealthy=_beyond(_UNSCORED, 0),
        describe=_without_score,
        advice="they train nothing; the first failure of each kind of each function is printed above",
    ),
    Check(
        metric="not finite",
        unhealthy=lambda lines: bool(_not_finite(lines[-1])),
        describe=lambda line: f"not a finite number: {shortened(_not_finite(line))}",
        advice=f"{_LEARNING_RATE}, or look for a reward or a model that overflows",
        harmful=True,
    ),
    Check(
        metric="skipped",
        unhealthy=lambda lines: bool(skipped_roles(lines[-1])),
        describe=lambda line: f"updates were skipped ({', '.join(skipped_roles(line))})",
        advice="their losses or gradients were not finite; several in a row end the run. Lower the learning rate",
        harmful=True,
    ),
    _above(
        "policy/approxkl",
        0.05,
        f"the updates of a step move the policy too far; {_LEARNING_RATE} or algo.ppo_epochs",
        at_once=5.0,
        harmful=True,
        unless=_against_engines,
    ),
    _above(
        "policy/clipfrac",
        0.3,
        f"the updates are too large for the clip range; {_LEARNING_RATE}, or the optimizer steps of a step",
        harmful=True,
        unless=_clips_by_design,
    ),
    _above(
        "objective/kl_per_token",
        1.0,
        f"the policy is far from the reference; {_LEARNING_RATE} or raise algo.kl.coef, and read samples.jsonl",
        harmful=True,
    ),
    _below(
        "policy/entropy",
        0.02,
        "all responses to a prompt are alike; lower the learning rate, or raise algo.entropy_coef",
        harmful=True,
    ),
    _above(
        "truncated_fraction",
        0.2,
        "rollout.max_new_tokens is too short, or the model does not end its responses; read samples.jsonl",
        unless=_has_conversations,
    ),
    _above(
        "truncated_fraction",
        0.2,
        "it is too short, or the model does not end its turns or the task; read samples.jsonl",
        unless=lambda line: not _has_conversations(line),
        describe=_limit_of_conversations,
    ),
    _above(
        "group/zero_std_fraction",
        0.8,
        "most prompts teach nothing: all their responses have the same score; choose prompts that are neither too easy "
        "nor too hard, or set algo.filter",
        steps=5,
    ),
    *(
        _jump(
            f"{role}/grad_norm",
            "look for instability in the next steps; lower the learning rate or clip_grad",
            least=1e-5,
        )
        for role in ("policy", "value", "sft", "reward_model")
    ),
    _jump(
        "rollout/logprob_gap",
        "trainers and engines have different weights; end the run, and report it",
        least=1e-3,
        harmful=True,
    ),
    _below(
        "value/explained_variance",
        0.0,
        "the critic predicts worse than a constant; raise critic.optimizer.lr, or train the critic first",
        steps=10,
    ),
    Check(
        metric="objective/score",
        unhealthy=_score_fell,
        rule=f"far below its best {_AVERAGED} steps",
        advice=f"the policy gets worse; {_LEARNING_RATE}, and read samples.jsonl",
        steps=2,
        harmful=True,
    ),
    Check(
        metric="response_length/mean",
        unhealthy=_longer_for_nothing,
        rule=f"a quarter longer than {_GROWTH_OVER} steps ago, and the score has not risen",
        advice="a reward or a loss may favour length; read samples.jsonl, and see algo.aggregation",
        steps=2,
    ),
)
"""All checks. Rows of one metric are next to the lines of its table in docs/metrics.md."""

_UNSAVED: Final = 3600.0  # seconds


def unsaved_run(steps: int) -> Check:
    """Returns a check for runs of so many steps, with a checkpoint after the last one alone, that take over an hour."""

    def condition(lines: Lines) -> bool | None:
        seconds = _values(lines, "time/step")
        return steps * median(seconds) > _UNSAVED if seconds else None

    return Check(
        metric="checkpoint.every",
        unhealthy=condition,
        describe=lambda _: f"the run's {steps} steps take over an hour, and only the last one has a checkpoint",
        advice="an interrupted run starts again; set checkpoint.every",
        steps=3,
    )


def limited_checks(limits: Limits) -> list[Check]:
    """Returns all checks, with other limits of some metrics, and one for each of the other metrics with a limit."""
    known = {check.metric for check in CHECKS if check.limited is not None}
    checks: list[Check] = []
    for check in CHECKS:
        if check.limited is None or check.metric not in limits:
            checks.append(check)
        elif (limit := limits[check.metric]) is not None:
            checks.append(check.limited(limit))
    own = {metric: limit for metric, limit in limits.items() if limit is not None and metric not in known}
    return [*checks, *(_above(metric, limit, "see health.limits", harmful=True) for metric, limit in own.items())]


def health_limits(fields: Mapping[str, Any]) -> Limits:
    """Returns the limits in the fields of a run's configuration, whose checks may be older."""
    section: Any = fields.get("health")
    given: Any = section.get("limits") if isinstance(section, Mapping) else None
    limits: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    return {name: limit for name, limit in limits.items() if limit is None or isinstance(limit, int | float)}


def shown_limits(limits: Limits) -> dict[str, str]:
    """Returns the limits of healthy values by metric."""
    return {check.metric: check.limit for check in limited_checks(limits) if check.limit}
