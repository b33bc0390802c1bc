"""Asynchronous runs: bit-identical for any number of engines, and after an engine or the driver is killed."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e import runs
from tests.e2e.runs import Finished, finish, lines, numbers, run_to_end, started, train
from tests.e2e.test_endings import process_that_prints_to, wait_for

pytestmark = [pytest.mark.e2e]

STEPS = 4
GRPO = "configs/debug/grpo.yaml"
SETTINGS = [
    "groups.train.devices=0",
    "groups.train.roles.actor={tp: 1, tokens_per_micro_batch: 512, offload: false}",
    "groups.train.roles.reference=null",
    "algo.kl={in: reward, estimator: k1, coef: 0}",
    "cluster.devices_per_node=3",
    "rollout.sleep=false",
    "rollout.max_new_tokens=160",
    "rollout.max_model_len=256",
    "model.random.config.max_position_embeddings=512",
    "rollout.max_staleness=1",
    "evaluation=null",
    'reward.functions=[{name: "tests.e2e.rules:remainder", args: {divisor: 7}}]',
    f"run.steps={STEPS}",
    "checkpoint.every=1",
]
LONG = [
    "data.prompts_per_step=2",
    "data.samples_per_prompt=2",
    "rollout.ignore_eos=true",
    "rollout.max_new_tokens=400",
    "rollout.max_model_len=448",
]
"""Few and long responses, whose generation takes longer than their update."""
MIXTURE = [
    "model.random.config={architectures: [Qwen3MoeForCausalLM], model_type: qwen3_moe, num_experts: 8, "
    "num_experts_per_tok: 2, moe_intermediate_size: 64, num_hidden_layers: 2}",
    "actor.optimizer.lr=3e-3",
    "data.prompts=null",
    "data.random={count: 4, min_tokens: 40, max_tokens: 70}",
]
"""Its tokens go to recorded experts, which soon are not its own choice; every step repeats prompts that fill blocks."""
ADAPTERS = ["actor.lora.rank=4", "resharding.adapters=separate", "actor.optimizer.lr=1e-2"]
"""Engines have the weights once, and a replaced one gets them, too."""
TIMES = (*runs.TIMES, "rollout/engine", "rollout/queue_depth")


def run(directory: Path, *settings: str, before: str = "pass") -> Finished:
    return run_to_end(["train", GRPO, f"run.dir={directory}", *SETTINGS, *settings], before)


def run_ppo(directory: Path, *settings: str) -> list[dict[str, Any]]:
    finished = train(directory, "algo.scores.truncate_at={token: 5, after: 2}", "run.steps=2", *settings)
    finished.assert_succeeded()
    return metrics(directory)


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The metrics of every step, except times and placement."""
    return numbers(directory / "metrics.jsonl", TIMES)


Row = list[tuple[str, float, float, int]]


def trace(directory: Path) -> dict[tuple[int, str], Row]:
    """The spans of each process of each attempt: names, starts and ends in seconds, and the driver's steps."""
    events = json.loads((directory / "trace.json").read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows: dict[tuple[int, str], Row] = {(pid, name): [] for (pid, _), name in names.items()}
    for e in (event for event in events if event["ph"] == "X"):
        row = rows[e["pid"], names[e["pid"], e["tid"]]]
        row.append((e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["args"]["step"]))
    return {row: sorted(spans, key=lambda span: span[1:3]) for row, spans in rows.items()}


def assert_traced(directory: Path) -> None:
    """The trace shows the times of metrics.jsonl, and that the engine samples while the actor is updated."""
    rows = trace(directory)
    assert set(rows) == {(1, name) for name in ("driver", "train rank 0", "rollout engine 0", "scorer 0")}
    for (_, name), spans in rows.items():
        spans = [span for span in spans if not span[0].startswith("step ")]
        assert all(b[1] >= a[2] - 1e-6 for a, b in pairwise(spans)), f"spans of {name} overlap"
    driver, trainer, engine = (rows[1, name] for name in ("driver", "train rank 0", "rollout engine 0"))
    for line in lines(directory / "metrics.jsonl"):
        step = line["step"]
        of_driver = {name: (start, end) for name, start, end, at in driver if at == step}
        start, end = of_driver[f"step {step}"]
        assert end - start == pytest.approx(line["time/step"], abs=0.2)
        for phase in ("experience", "update"):
            begun, ended = of_driver[phase]
            assert start <= begun <= ended <= end
            assert ended - begun == pytest.approx(line[f"time/{phase}"], abs=0.1)
        (logprobs,) = [end - start for name, start, end, at in trainer if (name, at) == ("actor.logprobs", step)]
        assert logprobs == pytest.approx(line["time/logprobs"], abs=1e-5)
    names = {name for name, *_ in (*trainer, *engine)}
    assert names >= {"actor.update", "actor.send_weights", "actor.save", "rollout.receive_weights", "wait"}
    updates = [span for span in trainer if span[0] == "actor.update"]
    sampling = [span for span in engine if span[0] == "rollout.generate"]
    both = sum(max(0.0, min(a[2], b[2]) - max(a[1], b[1])) for a in updates for b in sampling)
    assert both > 0, "the engine generates during an update; for how long depends on the machine"


@pytest.mark.parametrize(
    ("model", "staleness"),
    [
        pytest.param(MIXTURE, 1, id="mixture"),
        pytest.param(ADAPTERS, 1, id="adapters"),
        pytest.param([], 2, id="staleness 2", marks=pytest.mark.matrix),
    ],
)
def test_an_exact_run_is_the_same_with_a_second_engine_a_killed_engine_and_a_killed_driver(
    tmp_path: Path, model: list[str], staleness: int
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    shared = [f"rollout.max_staleness={staleness}", *model]
    one = run(straight, *shared, "rollout.devices=1")
    one.assert_succeeded()
    told = metrics(straight)
    assert [line["staleness/max"] for line in told] == [min(step, staleness) for step in range(STEPS)]
    assert all(line["policy/rerouted"] > 0.1 for line in told if model is MIXTURE), (
        "the trainer chooses as the engines did"
    )
    assert_traced(straight)

    settings = [*shared, "rollout.devices=1-2", "rollout.max_replacements=1"]
    with started(["train", GRPO, f"run.dir={broken}", *SETTINGS, *settings]) as program:
        wait_for(broken / "attempts.jsonl")
        while "started in" not in (written := os.read(program[0].stdout.fileno(), 1 << 16).decode()):
            assert written, "it ended"
        os.kill(process_that_prints_to(broken / "logs" / "rollout-engine-1.log"), signal.SIGKILL)
        wait_for(broken / "checkpoints" / "step-2" / "manifest.json")
        program[0].kill()
        finish(*program)
    assert lines(broken / "metrics.jsonl")[0]["rollout/engines_replaced"] == 1

    resumed = run(broken, *shared, "rollout.devices=1")
    resumed.assert_succeeded()
    assert metrics(broken) == told
    assert {attempt for attempt, _ in trace(broken)} == {1, 2}
    files = ["export/model.safetensors"]
    if model is ADAPTERS:
        files.append("export-adapter/adapter_model.safetensors")
    for file in files:
        assert (broken / file).read_bytes() == (straight / file).read_bytes()


@pytest.mark.matrix
def test_an_exact_run_is_the_same_when_an_engine_is_killed_during_a_sync(tmp_path: Path) -> None:
    straight, struck = tmp_path / "straight", tmp_path / "struck"
    settings = ["rollout.devices=1-2", "rollout.max_replacements=1", "resharding.bucket_mib=0.005"]  # a long sync
    strike = "from tests.e2e.strikes import after_sync_begins; after_sync_begins(1, 'SIGKILL', 0.01)"
    for directory, before in ((straight, "pass"), (struck, strike)):
        finished = run(directory, *settings, before=before)
        finished.assert_succeeded()
    assert "rollout engine 1 died in rollout.receive_weights. It is replaced" in finished.errors
    assert [line["rollout/engines_replaced"] for line in lines(struck / "metrics.jsonl")] == [1] * STEPS
    assert metrics(struck) == metrics(straight)
    assert (struck / "export/model.safetensors").read_bytes() == (straight / "export/model.safetensors").read_bytes()


@pytest.mark.matrix
def test_an_engine_that_stops_in_flight_is_replaced(tmp_path: Path) -> None:
    """It stops while it generates, just before a sync, which detects it."""
    directory = tmp_path / "run"
    settings = ["rollout.devices=1-2", "rollout.mode=inflight", "rollout.max_staleness=2", "run.steps=8", *LONG]
    limits = ["rollout.max_replacements=1", "cluster.time_limits.sync=20"]
    strike = "from tests.e2e.strikes import after_sync_begins; after_sync_begins(1, 'SIGSTOP', 0)"
    finished = run(directory, *settings, *limits, before=strike)
    finished.assert_succeeded()
    assert "No answer within 20 s from rollout engine 1 in rollout.receive_weights. It is replaced" in finished.errors
    assert lines(directory / "metrics.jsonl")[-1]["rollout/engines_replaced"] == 1
    assert max(line["staleness/max"] for line in metrics(directory)) <= 2


@pytest.mark.parametrize(
    "engines",
    [
        pytest.param(["rollout.devices=1"], id="one"),
        pytest.param(["rollout.devices=1", *ADAPTERS], id="adapters"),
        pytest.param(["rollout.devices=1-2", "rollout.rolling_update=true"], id="rolling", marks=pytest.mark.matrix),
    ],
)
def test_responses_in_flight_continue_with_new_weights(tmp_path: Path, engines: list[str]) -> None:
    directory, recorded = tmp_path / "run", tmp_path / "recorded"
    settings = ["rollout.mode=inflight", "rollout.max_staleness=2", "rollout.top_p=0.8", *engines, *LONG]
    finished = run(directory, *settings, f"rollout.record={recorded}", "run.steps=8")
    finished.assert_succeeded()
    told = metrics(directory)
    assert max(line["staleness/max"] for line in told) <= 2
    gaps = [line["rollout/logprob_gap/age_0"] for line in told if "rollout/logprob_gap/age_0" in line]
    assert gaps
    assert max(gaps) < 1e-5, "of the tokens that were kept"
    assert {line["rollout/kept_exceeded"] for line in told} == {0.0}
    spans = [np.load(file)["versions"] for file in recorded.iterdir()]
    assert len(spans) == 8 * 4
    assert any(len(of_response) > 1 for of_response in spans), "no response saw two versions"
    for of_response in spans:
        assert of_response[0, 0] == 0
        assert (of_response[1:, 0] == of_response[:-1, 1]).all()
        assert (np.diff(of_response[:, 2]) > 0).all()


APART = [
    "groups.train={devices: 0-1, roles: {actor: {tp: 2, pp: 1}, critic: null, reference: null, reward: null}}",
    "groups.values={devices: 2-3, roles: {critic: {pp: 2, tokens_per_micro_batch: 128}, reference: {tp: 2}}}",
    "groups.reward={devices: 4, roles: {reward: {tokens_per_micro_batch: 128}}}",
    "rollout.devices=5",
    "cluster.devices_per_node=7",
]
PARTS = ["rollout.inference_parts=5", "rollout.devices=5-6"]
"""Two engines change who finishes when."""


@pytest.mark.matrix
def test_overlapping_scoring_with_generation_gives_the_numbers_of_roles_that_take_turns(tmp_path: Path) -> None:
    """The packing differs from that of the whole step, as does the layout, and therefore the rounding."""
    parts, whole = run_ppo(tmp_path / "parts", *APART, *PARTS), run_ppo(tmp_path / "whole")
    first = [lines(tmp_path / name / "updates.jsonl")[0] for name in ("parts", "whole")]
    for metric in ("policy/loss", "policy/grad_norm", "value/loss", "value/grad_norm"):
        assert first[0][metric] == pytest.approx(first[1][metric], rel=1e-5), metric
    assert len(parts) == len(whole) == 2
    for one, other in zip(parts, whole, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
