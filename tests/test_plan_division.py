"""The estimate of a division of devices: against closed forms, and against the rule of the rollout buffer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from megarl.cli import app
from megarl.config import PPOConfig, load, save
from megarl.plan.division import divisions
from megarl.plan.rates import Rates
from megarl.plan.simulation import SimulatedRun, StepEstimate

DEBUG = Path(__file__).parents[1] / "configs" / "debug" / "grpo.yaml"
APART = [
    "groups.train.devices=0-1",
    "groups.train.roles.actor={tp: 2, offload: false}",
    "groups.train.roles.reference.offload=false",
    "rollout={devices: 2-3, sleep: false}",
]


def run(rates: Rates, samples: int, staleness: int = 0, mode: str = "exact", **given: Any) -> SimulatedRun:
    sizes = {"engines": 1, "trainers": 1, "shared": False, **given}
    return SimulatedRun(rates, samples=samples, staleness=staleness, mode=mode, **sizes)


def rates(*, sampling: float, training: float, sync: float = 0.5, score: float = 0.0) -> Rates:
    """Ten responses of 100 tokens take so many seconds."""
    return Rates(engine=1000 / sampling, trainer=1000 / training, sync=sync, score=score, lengths=[[100.0] * 10])


def assert_is(estimate: StepEstimate, seconds: float, engines_idle: float, trainers_idle: float) -> None:
    found = (estimate.seconds, estimate.engines_idle, estimate.trainers_idle)
    assert found == pytest.approx((seconds, engines_idle, trainers_idle), abs=1e-6)


@pytest.mark.parametrize(("sampling", "training"), [(4.0, 1.0), (1.0, 4.0), (2.0, 2.0)])
def test_a_synchronous_step_takes_the_sum_and_an_asynchronous_one_the_maximum(sampling: float, training: float) -> None:
    given = rates(sampling=sampling, training=training)
    total, longer = sampling + training + 0.5, max(sampling, training) + 0.5
    for shared in (False, True):
        assert_is(run(given, 10, shared=shared).estimate(), total, 1 - sampling / total, 1 - training / total)
    for staleness in (1, 2):
        estimate = run(given, 10, staleness).estimate()
        assert_is(estimate, longer, 1 - sampling / longer, 1 - training / longer)


def test_scoring_extends_synchronous_steps_and_is_hidden_by_staleness() -> None:
    given = rates(sampling=1.0, training=4.0, score=2.0)
    assert run(given, 10).estimate().seconds == pytest.approx(1 + 2 + 4 + 0.5)
    assert run(given, 10, 1).estimate().seconds == pytest.approx(4.5)


def test_more_engines_share_the_tokens_but_not_the_longest_response() -> None:
    """10 responses of 100 tokens and 2 of 300, by 1 engine and by 2, at 0.01 s + 0.001 s per response a token."""
    given = Rates(engine=1000.0, token=0.01, trainer=1e9, lengths=[[100.0] * 10 + [300.0] * 2])
    assert run(given, 12).estimate().seconds == pytest.approx(100 * (0.01 + 0.012) + 200 * (0.01 + 0.002), abs=1e-3)
    two = run(given, 12, engines=2).estimate()
    assert two.seconds == pytest.approx(100 * (0.01 + 0.006) + 200 * (0.01 + 0.001), abs=1e-3)


def test_subsampled_responses_give_the_same_estimate() -> None:
    many = Rates(engine=1000.0, token=0.01, trainer=1e9, lengths=[[100.0] * 999 + [400.0]])
    found = run(many, 1000).estimate().seconds
    assert found == pytest.approx(100 * (0.01 + 1.0) + 300 * (0.01 + 0.004), rel=1e-3)


@pytest.mark.parametrize("mode", ["exact", "bounded", "inflight"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_step_starts_before_the_staleness_bound_allows_it(mode: str, staleness: int) -> None:
    """Step t may start at version t - 1 - S, and does at once unless steps follow one another."""
    chance = random.Random(f"{mode} {staleness}")
    lengths = [[chance.choice([10.0, 100.0, 1000.0]) for _ in range(8)] for _ in range(7)]
    given = Rates(engine=500.0, token=0.01, trainer=300.0, sync=0.5, lengths=lengths)
    simulated = run(given, 8, staleness, mode, engines=2)
    started: dict[int, int] = {}
    sample = simulated.sample

    def noting(step: int) -> Any:
        started[step] = simulated.buffer.version
        return (yield from sample(step))

    simulated.sample = noting
    simulated.estimate()
    ages = [step - 1 - version for step, version in started.items()]
    assert list(started) == sorted(started)
    assert max(ages) == staleness
    if mode == "exact":
        assert ages == [min(step - 1, staleness) for step in started]


def test_a_long_response_costs_nothing_while_others_continue() -> None:
    """Every fourth step has a response that takes 5 s by itself; a step of the trainers takes 1.6 or 2.5 s."""
    lengths = [[50.0] * 15 + [500.0 if step % 4 == 0 else 50.0] for step in range(16)]
    given = Rates(engine=2000.0, token=0.01, trainer=500.0, sync=0.1, lengths=lengths)
    seconds = {
        (mode, staleness): run(given, 16, staleness, mode).estimate().seconds
        for mode in ("exact", "inflight")
        for staleness in (1, 4)
    }
    alone = 50 * (0.01 + 16 / 2000) + 450 * (0.01 + 1 / 2000)
    assert seconds["exact", 1] == pytest.approx((alone + 2 * 1.6 + 2.5) / 4 + 0.1)
    assert seconds["exact", 4] == pytest.approx((alone + 3 * 1.6) / 4 + 0.1), "it is sampled beside the longer work"
    assert seconds["inflight", 4] == pytest.approx((3 * 1.6 + 2.5) / 4 + 0.1)


def test_divisions_are_limited_to_those_the_layouts_allow() -> None:
    config = load(DEBUG, [*APART, "cluster.devices_per_node=8", "rollout.devices=2-7"])
    assert isinstance(config, PPOConfig)
    found = [(division.engines, division.trainers) for division in divisions(config) if not division.shared]
    assert found == [(2, 6), (4, 4), (6, 2)]
    assert [division.engines for division in divisions(config) if division.shared] == [8]


def written(directory: Path, *, staleness: int, steps: list[dict[str, float]]) -> Path:
    directory.mkdir()
    save(load(DEBUG, [*APART, f"rollout.max_staleness={staleness}", f"run.dir={directory}"]), directory / "config.yaml")
    lines = [json.dumps({"step": number, **step}) + "\n" for number, step in enumerate(steps, start=1)]
    (directory / "metrics.jsonl").write_text("".join(lines))
    return directory


def step(longest: float, mean: float, **seconds: float) -> dict[str, float]:
    named = {name.replace("__", "/"): value for name, value in seconds.items()}
    lengths = {"response_length/max": longest, "response_length/mean": mean, "response_length/min": 1.0}
    return {"rollout/samples": 10, **lengths, "sync/seconds": 0.5, "sync/offload_seconds": 0.25, **named}


def test_rates_are_estimated_from_the_metrics_of_a_run(tmp_path: Path) -> None:
    """Two engines that take 0.02 s a token of the longest response and 0.004 s a token; two trainer devices."""
    steps = [step(999, 999, time__rollout=99, time__step=99, time__reward=9, time__experience=9, time__update=9)]
    for longest, mean in ((50, 30), (100, 30), (70, 60), (200, 60)):
        sampling = 0.02 * longest + 0.004 * 10 * mean / 2
        parts = {"time__reward": 3.0, "time__logprobs": 1.0, "time__ref": 0.5, "time__experience": 3.25}
        steps.append(step(longest, mean, time__rollout=sampling, time__step=sampling + 9, time__update=5.0, **parts))
    found = Rates.measured(written(tmp_path / "run", staleness=0, steps=steps))
    assert (found.token, found.engine) == pytest.approx((0.02, 250.0))
    assert (found.score, found.sync) == pytest.approx((1.5, 0.75))
    assert found.trainer == pytest.approx(1800 / 2 / (4 * (5.0 + 1.75)))
    assert [(sum(lengths), max(lengths), min(lengths)) for lengths in found.lengths] == [
        (300, 50, 1),
        (300, 100, 1),
        (600, 70, 1),
        (600, 200, 1),
    ]


def test_engine_busy_time_is_read_from_an_asynchronous_run(tmp_path: Path) -> None:
    seconds = {"time__reward": 0.5, "time__logprobs": 1.0, "time__experience": 1.5, "time__update": 2.0}
    steps = [step(100, 50, time__rollout=0, time__step=4, rollout__engine_idle=idle, **seconds) for idle in (1, 0.5, 1)]
    found = Rates.measured(written(tmp_path / "run", staleness=1, steps=steps))
    assert (found.token, found.engine) == pytest.approx((0.0, 500 / 2 / 2.0))
    assert found.trainer == pytest.approx(500 / 2 / 3.5)


def invoke(*arguments: str, columns: int = 160) -> Result:
    return CliRunner().invoke(app, ["plan", str(DEBUG), *APART, *arguments], env={"COLUMNS": str(columns)})


@pytest.mark.process
def test_the_command_prints_a_row_per_division() -> None:
    """4 x 4 responses of 32 tokens: 512 tokens take 1 s of an engine and 4 s of a trainer device."""
    done = invoke("--rates", "engine=512,trainer=128,sync=0.5", columns=40)
    assert done.exit_code == 0, done.stderr
    (own,) = [line.split() for line in done.stdout.splitlines() if line.split()[:2] == ["2", "2"]]
    assert own[2:5] == ["3", "83%", "33%"], "0.5 + 2 + 0.5"
    assert own[5:] == ["2.5", "80%", "20%"] * 3


@pytest.mark.process
@pytest.mark.parametrize(
    ("rates", "rule"),
    [("engine=5", "trainer missing"), ("engine=5,trainer=-1", "must be a number above 0"), ("nowhere", "nowhere")],
)
def test_invalid_rates_are_reported(rates: str, rule: str) -> None:
    done = invoke("--rates", rates)
    assert done.exit_code == 2
    assert "--rates" in done.stderr
    assert rule in done.stderr
