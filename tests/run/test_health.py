"""Findings of the health checks in deliberately broken runs, real or constructed, and in healthy ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks.learning.cells import ADAPTED, CONTROLS, CURRICULA, DISTILLED, FINE_TUNED, PREFERENCES, ROWS
from megarl.config.schema.training_sections import CheckedMetric, LimitedMetric
from megarl.run.health import CHECKS, HealthMonitor, limited_checks, shown_limits
from megarl.run.verdict import judge

HEALTHY = (
    *("demo", "ppo", "grpo", "rloo", "reinforce_pp", "remax", "dapo", "gspo", "raft"),
    *("decoupled_ppo", "coupled_ppo_stale", "lookup", "shuffled_scores"),
)
HISTORIES = Path(__file__).parent / "histories"
METRICS_PAGE = Path("docs/metrics.md").read_text(encoding="utf-8")

Lines = list[dict[str, Any]]


def recorded(name: str, part: str = "metrics") -> Lines:
    """The lines of a real run."""
    columns: Mapping[str, Sequence[Any]] = json.loads((HISTORIES / f"{name}.json").read_text())[part]
    lines = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return [{metric: value for metric, value in line.items() if value != "absent"} for line in lines]


def healthy(steps: int = 40) -> Lines:
    """A run of a language model that learns: its score rises, its responses grow, its entropy falls slowly."""
    noise = random.Random(0)
    return [
        {
            "step": step,
            "objective/score": min(0.3 + 0.01 * step, 0.8) + noise.gauss(0, 0.03),
            "objective/kl_per_token": 0.0005 * step,
            "policy/approxkl": 0.002 * noise.uniform(0.5, 2.0),
            "policy/clipfrac": 0.02 * noise.uniform(0.5, 2.0),
            "policy/entropy": max(0.6 - 0.005 * step, 0.2),
            "policy/grad_norm": 0.15 * noise.uniform(0.5, 3.0),
            "policy/skipped": 0.0,
            "truncated_fraction": 0.08 * noise.uniform(0.5, 2.0),
            "group/zero_std_fraction": 0.3 * noise.uniform(0.5, 2.0),
            "rollout/logprob_gap": 0.01 * noise.uniform(0.9, 1.1),
            "response_length/mean": min(600.0 + 10 * step, 1500.0),
            "rewards/unscored": 0,
            "rewards/unscored/exact": 0,
            "rollout/samples": 1024,
            "value/explained_variance": -0.2 if step < 6 else 0.4,
        }
        for step in range(1, steps + 1)
    ]


def changed(since: int, **metrics: Callable[[int, float], Any]) -> Lines:
    """The healthy run, with other values since a step; `metrics` gives each from the step and the healthy value."""
    lines = healthy()
    for line in lines[since - 1 :]:
        for name, change in metrics.items():
            metric = name.replace("__", "/")
            line[metric] = change(line["step"], line[metric])
    return lines


def begun(lines: Lines) -> list[tuple[str, int]]:
    return [(finding.check.metric, finding.first) for finding in HealthMonitor(lines).findings]


BROKEN: Mapping[str, tuple[Lines, list[tuple[str, int]]]] = {
    "a learning rate 20 times too high": (
        recorded("grpo_high_lr"),
        [("policy/approxkl", 1), ("objective/kl_per_token", 4), ("group/zero_std_fraction", 9)],
    ),
    "the same with a critic": (
        recorded("ppo_high_lr"),
        [("policy/approxkl", 1), ("policy/clipfrac", 3), ("objective/kl_per_token", 4)],
    ),
    "a function that always raises": (recorded("function_fails"), [("rewards/unscored", 1)]),
    "a function that raises for some prompts": (recorded("function_fails_sometimes"), [("rewards/unscored", 1)]),
    "responses that are cut off": (recorded("short_limit"), [("truncated_fraction", 3)]),
    "a task that no response solves": (recorded("impossible_task"), [("group/zero_std_fraction", 6)]),
    "entropy that collapses": (
        changed(11, policy__entropy=lambda step, value: 0.5 * 0.6 ** (step - 11)),
        [("policy/entropy", 20)],  # below 0.02 from step 18 on
    ),
    "a gradient that jumps": (
        changed(30, policy__grad_norm=lambda step, value: 40.0 if step == 30 else value),
        [("policy/grad_norm", 30)],
    ),
    "engines that miss a sync": (
        changed(20, rollout__logprob_gap=lambda step, value: 0.3),
        [("rollout/logprob_gap", 20)],
    ),
    "clipping": (changed(8, policy__clipfrac=lambda step, value: 0.45), [("policy/clipfrac", 10)]),
    "a score that falls": (
        changed(25, objective__score=lambda step, value: 0.05),
        [("objective/score", 27)],
    ),
    "gradients that are not finite": (
        changed(12, policy__skipped=lambda step, value: 0.25, policy__grad_norm=lambda step, value: None),
        [("not finite", 12), ("skipped", 12)],
    ),
    "a critic that learns nothing": (
        changed(1, value__explained_variance=lambda step, value: -0.3),
        [("value/explained_variance", 10)],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_is_found_at_its_step(name: str) -> None:
    lines, expected = BROKEN[name]
    assert begun(lines) == expected


def test_healthy_metrics_and_gradients_of_rounding_are_no_finding() -> None:
    """Where the advantages of a step are all 0, its gradients are what rounding leaves, in steps without a signal."""
    assert begun(healthy(500)) == []
    assert begun(changed(1, policy__grad_norm=lambda step, value: 1.12e-8 if step == 30 else 1e-10)) == []


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_recorded_run_has_no_finding(name: str) -> None:
    assert begun(recorded(name)) == []


def test_a_healthy_run_of_every_algorithm_that_learns_from_rollouts_is_recorded() -> None:
    assert {name for name, _ in ROWS} - {*CONTROLS, *PREFERENCES, *DISTILLED, *CURRICULA, *ADAPTED, *FINE_TUNED} <= {
        name.removesuffix("_stale") for name in HEALTHY
    }
    assert all(verdict(name).startswith("learned: ") for name in HEALTHY if name != "shuffled_scores")


def test_a_finding_is_reported_at_its_start_and_its_end() -> None:
    """Above the limit in steps 11 to 14, 16 and 17: it lasts over the healthy step 15."""
    lines = changed(11, policy__approxkl=lambda step, value: 0.08 if step < 18 and step != 15 else value)
    monitor = HealthMonitor()
    said = {line["step"]: messages for line in lines if (messages := monitor.add(line))}
    assert {step: [message.split(" is ")[0] for message in messages] for step, messages in said.items()} == {
        13: ["step 13: policy/approxkl"],
        22: ["step 22: healthy again: policy/approxkl, since step 18"],
    }
    (finding,) = monitor.findings
    assert (finding.first, finding.last) == (13, 17)


def test_a_step_far_beyond_the_limit_is_reported_immediately() -> None:
    assert begun(changed(40, policy__approxkl=lambda step, value: 0.2)) == []
    assert begun(changed(40, policy__approxkl=lambda step, value: 0.3)) == [("policy/approxkl", 40)]


def test_limits_may_be_others_or_none() -> None:
    """0.12 in all steps from the 30th on; a single step of five times the limit begins a finding, too."""
    lines = changed(30, policy__approxkl=lambda step, value: 0.12)

    def found(limit: float | None) -> list[int]:
        return [finding.first for finding in HealthMonitor(lines, limits={"policy/approxkl": limit}).findings]

    assert [found(limit) for limit in (0.02, 0.1, 0.15, None)] == [[30], [32], [], []]
    assert shown_limits({"policy/approxkl": 0.1})["policy/approxkl"] == "< 0.1"
    assert "policy/approxkl" not in shown_limits({"policy/approxkl": None})
    assert [check.metric for check in limited_checks({})] == [check.metric for check in CHECKS]


def test_metrics_without_a_limit_may_get_one() -> None:
    lines = [{**line, "objective/kl": 31.0 if line["step"] >= 12 else 1.0} for line in healthy()]
    assert begun(lines) == []
    monitor = HealthMonitor(lines, limits={"objective/kl": 30.0})
    assert [(finding.check.metric, finding.first) for finding in monitor.findings] == [("objective/kl", 14)]
    assert (monitor.finding_at(13, ["objective/kl"]), monitor.finding_at(14, ["skipped"])) == (None, None)
    assert monitor.finding_at(14, ["objective/kl"]) is monitor.findings[0]


def test_the_configuration_names_every_check() -> None:
    limited = set(get_args(LimitedMetric))
    assert {check.metric for check in CHECKS} <= limited | {*chain(*map(get_args, get_args(CheckedMetric)))}
    assert {check.metric for check in CHECKS if check.limit is not None} <= limited
    changed_limits = limited_checks(dict.fromkeys(limited, 1.0))
    assert {check.metric for check in changed_limits if check.limit is not None} == limited


def test_limits_that_do_not_hold_for_an_algorithm_are_not_applied() -> None:
    """GSPO clips many sequences; with older samples, the ratio to the engines is no measure of an update."""
    lines = changed(8, policy__clipfrac=lambda step, value: 0.45)
    assert begun([{**line, "policy/sequence_ratio": 1.0} for line in lines]) == []
    stale = changed(2, policy__approxkl=lambda step, value: 0.1)
    for line in stale:
        line["staleness/max"] = 4.0
        del line["rollout/logprob_gap"]
    assert begun(stale) == []


def test_every_limit_is_documented() -> None:
    rows = [line for line in METRICS_PAGE.splitlines() if line.startswith("|")]
    for check in CHECKS:
        if check.limit is not None:
            described = [row for row in rows if f"`{check.metric}`" in row.split("|")[1]]
            assert len(described) == 2, check.metric
            assert all(f"{check.limit:g}" in row for row in described), f"{check.metric}: {check.limit}"


def verdict(name: str, *, evaluated: bool = True) -> str:
    lines = recorded(name)
    return judge(lines, recorded(name, "evaluations") if evaluated else [], HealthMonitor(lines).findings)


def test_verdicts_on_held_out_prompts() -> None:
    assert verdict("demo") == "learned: held-out exact_match 0.363 ± 0.029 -> 0.828 ± 0.023"
    assert verdict("grpo") == "learned: held-out exact_match 0.364 ± 0.029 -> 0.706 ± 0.028"
    assert verdict("grpo_high_lr").startswith(
        "collapsed at step 1: held-out exact_match 0.364 ± 0.029 -> 0; policy/approxkl is 5.606, above 0.05: "
    )
    assert verdict("impossible_task").startswith(
        "no clear change: held-out exact_match 0.364 ± 0.029 -> 0.36 ± 0.029; group/zero_std_fraction is 0.9375, "
    )
    assert verdict("shuffled_scores") == ("became worse: held-out exact_match 0.364 ± 0.029 -> 0.314 ± 0.028")


def test_without_evaluations_the_training_score_decides() -> None:
    assert verdict("grpo", evaluated=False) == "learned: objective/score in training 0.441 ± 0.055 -> 0.587 ± 0.053"
    assert judge(healthy(5), [], []) == ""


def test_a_divergence_is_learned_from_a_teacher_alone() -> None:
    lines = [{"step": step, "objective/kl_per_token": 3 - step / 10 + 0.01 * (step % 2)} for step in range(1, 21)]
    assert judge(lines, [], []).startswith("learned: objective/kl_per_token in training ")
    assert HealthMonitor(lines).findings == []
    assert HealthMonitor(lines, {"objective/kl_per_token": 1.5}).findings, "a limit that the user gave"
    scored = [{**line, "objective/score": None} for line in lines]
    assert judge(scored, [], []) == ""


def test_a_score_that_rose_does_not_hide_a_harmful_finding() -> None:
    evaluations = [{"step": step, "eval/right": step / 40, "eval/right_ci95": 0.02} for step in (0, 20, 40)]

    def judged(**metrics: Callable[[int, float], Any]) -> str:
        lines = changed(24, **metrics)
        return judge(lines, evaluations, HealthMonitor(lines).findings)

    learned = "learned: held-out right 0 ± 0.02 -> 1 ± 0.02"
    assert judged(policy__entropy=lambda step, value: 0.01).startswith(
        f"{learned}; but policy/entropy is 0.01, below 0.02"
    )
    assert judged(policy__entropy=lambda step, value: 0.01 if step < 28 else value) == learned
    assert judged(truncated_fraction=lambda step, value: 0.9) == learned


def test_a_lower_loss_is_better_by_more_than_a_percent() -> None:
    found: list[str] = []
    for first, last in ((4.6, 0.4), (0.4, 4.6), (4.61, 4.58)):
        evaluations = [{"step": 0, "eval/loss": first}, {"step": 600, "eval/loss": last}]
        found.append(judge([], evaluations, []))
    assert found == [
        "learned: held-out loss 4.6 -> 0.4",
        "became worse: held-out loss 0.4 -> 4.6",
        "no clear change: held-out loss 4.61 -> 4.58",
    ]
    lines = [{"step": step, "sft/loss": 4.6 - step / 10 + 0.01 * (step % 2)} for step in range(1, 21)]
    assert judge(lines, [], []).startswith("learned: sft/loss in training 4.0")
    lines = [{**line, "sft/loss": 6 - line["sft/loss"]} for line in lines]
    assert judge(lines, [], []).startswith("became worse: sft/loss in training ")


@pytest.mark.parametrize("logprob", ["eval/logprob", "eval/logprob_chosen"])
def test_an_accuracy_of_implicit_rewards_is_no_measure(logprob: str) -> None:
    """At first it is rounding noise, as policy and reference are equal; the loss of the pairs is one."""
    values = {0: (0.08, 0.693), 100: (0.5, 0.75)}
    evaluations: list[dict[str, float]] = []
    for step, (accuracy, loss) in values.items():
        evaluations.append({"step": step, "eval/accuracy": accuracy, "eval/loss": loss, logprob: -50.0})
    assert judge([], evaluations, []) == "became worse: held-out loss 0.693 -> 0.75"


def test_an_interval_may_be_zero() -> None:
    """Where all answers have the same score."""
    found: list[str] = []
    for last in (1, 0):
        scores = ((0, 0.0), (9, float(last)))
        evaluations = [{"step": step, "eval/right": value, "eval/right_ci95": 0.0} for step, value in scores]
        found.append(judge([], evaluations, []))
    assert found == ["learned: held-out right 0 -> 1", "no clear change: held-out right 0 -> 0"]


def test_a_run_that_lost_its_gain_has_collapsed() -> None:
    values = {0: 0.1, 10: 0.5, 20: 0.52, 30: 0.08}
    evaluations = [{"step": step, "eval/right": value, "eval/right_ci95": 0.04} for step, value in values.items()]
    measured = "held-out right 0.1 ± 0.04 -> 0.08 ± 0.04, best 0.52 ± 0.04 at step 20"
    assert judge([], evaluations, []) == f"collapsed at step 30: {measured}"
    lines = changed(24, policy__grad_norm=lambda step, value: 40.0 if step == 24 else value)
    assert judge(lines, evaluations, HealthMonitor(lines).findings) == f"collapsed at step 30: {measured}"
    lines = changed(24, policy__approxkl=lambda step, value: 0.4)
    assert judge(lines, evaluations, HealthMonitor(lines).findings).startswith(
        f"collapsed at step 24: {measured}; policy/approxkl"
    )
