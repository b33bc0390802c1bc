"""The debug run as a user starts it: Ray, four Megatron ranks with four roles, a vLLM engine, three PPO steps."""

from __future__ import annotations

import gzip
import json
import math
import socket
from pathlib import Path

import numpy as np
import pytest

from megarl.config import load
from megarl.dashboard.status.reading import read_status
from tests.e2e.conftest import DebugRun
from tests.e2e.runs import DEBUG, PARTS, SECRETS, lines

STAGES = ("offload", "agree", "pack", "transfer", "verify", "load", "commit", "reset")
SYNC = {f"sync/{stage}_seconds" for stage in STAGES} | {
    f"sync/{name}" for name in ("bytes", "messages", "staging_bytes", "seconds", "gb_per_second")
}

pytestmark = [pytest.mark.e2e]


def test_it_succeeds_and_leaves_nothing(debug_run: DebugRun) -> None:
    debug_run.finished.assert_succeeded()
    assert "3 steps in" in debug_run.finished.output
    assert not debug_run.finished.errors


def test_it_writes_a_line_per_step(debug_run: DebugRun) -> None:
    metrics = lines(debug_run.directory / "metrics.jsonl")
    assert [(line["step"], line["version"]) for line in metrics] == [(1, 1), (2, 2), (3, 3)]
    gaps: list[float] = []
    for line in metrics:
        assert all(math.isfinite(value) for value in line.values()), line
        assert line["rollout/samples"] == 16
        assert 1 <= line["response_length/mean"] <= line["response_length/max"] <= 32
        assert line["policy/grad_norm"] > 0
        assert line["value/grad_norm"] > 0
        assert line["policy/skipped"] == line["value/skipped"] == 0
        assert {name for name in line if name.startswith("sync/")} == SYNC
        assert all(line[name] > 0 for name in SYNC)
        assert line["staleness/max"] == 0, "the engine answers with the weights of the last step"
        assert line["rollout/logprob_gap"] < 1e-4, "trainer and engine disagree about the tokens that it sampled"
        stages, step = sum(line[f"time/{s}"] for s in ("rollout", "experience", "update", "sync")), line["time/step"]
        assert stages <= step + 0.01
        gaps.append(1 - stages / step)
    assert min(gaps) < 0.05, "a busy machine may hold up one step between its stages, not all three"


def test_it_reports_the_passes_of_every_role(debug_run: DebugRun) -> None:
    epochs, texts = 2, 4 * 3
    for line in lines(debug_run.directory / "metrics.jsonl"):
        tokens = 16 * (line["prompt_length/mean"] + line["response_length/mean"])
        for name in ("logprobs", "ref", "values"):
            assert line[f"perf/tokens/{name}"] == pytest.approx(tokens)
            assert line[f"perf/tokens_per_second/{name}"] == pytest.approx(tokens / line[f"time/{name}"])
        assert line["perf/tokens/critic_update"] == pytest.approx(epochs * tokens)
        assert epochs * tokens < line["perf/tokens/actor_update"] <= epochs * tokens + texts * 16
        assert line["perf/tflop/critic_update"] == pytest.approx(3 * epochs * line["perf/tflop/values"])
        assert not any(name.startswith("perf/mfu/") for name in line), "of no device is the peak known"
        assert 0 <= line["perf/idle/train"] < 1
        assert line["perf/rollout_tokens_per_second"] > 0
        phases = {name for name in line if name.startswith("memory/")}
        assert {f"memory/{phase}/train" for phase in ("inference", "update", "sync")} <= phases
        assert {"memory/rollout/rollout", "memory/sync/rollout"} <= phases
        assert all(0.1 < line[name] < 8 for name in phases)


def test_no_unused_id_is_sampled(debug_run: DebugRun) -> None:
    """The model has 100 ids, of which the configuration uses 96; a random model gives all similar probability."""
    samples = [np.load(file)["response_ids"] for file in debug_run.recorded.iterdir()]
    assert len(samples) > 48, "the filter took a single round of each step"
    assert max(ids.max() for ids in samples) < 96


def test_the_curriculum_knows_the_prompts_of_earlier_steps(debug_run: DebugRun) -> None:
    """Those that the filter rejected, too; there are 32."""
    drawn: set[str] = set()
    for line in lines(debug_run.directory / "metrics.jsonl"):
        assert line["curriculum/unknown"] == pytest.approx(1 - len(drawn) / 32)
        drawn |= {file.name.split("%2F")[1] for file in debug_run.recorded.glob(f"{line['step']}%2F*.npz")}


def test_the_actor_starts_equal_to_the_reference_and_diverges(debug_run: DebugRun) -> None:
    first, *_, last = lines(debug_run.directory / "metrics.jsonl")
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert abs(last["objective/kl"]) > 1e-5


def test_every_sync_sends_the_engines_shard_once(debug_run: DebugRun) -> None:
    """The engine holds every parameter of a model with tied embeddings, without padded vocabulary rows."""
    hidden, inner, layers, vocab, heads_times_size, kv_times_size = 128, 256, 4, 100, 128, 128
    qkv = (heads_times_size + 2 * kv_times_size) * (hidden + 1)
    layer = qkv + heads_times_size * hidden + 3 * hidden * inner + 2 * hidden
    elements = vocab * hidden + layers * layer + hidden
    assert {line["sync/bytes"] for line in lines(debug_run.directory / "metrics.jsonl")} == {4 * elements}


def test_it_writes_a_line_per_optimizer_step(debug_run: DebugRun) -> None:
    updates = lines(debug_run.directory / "updates.jsonl")
    assert [line["update"] for line in updates] == list(range(1, 13))
    assert [line["step"] for line in updates] == [1] * 4 + [2] * 4 + [3] * 4
    first = lines(debug_run.directory / "metrics.jsonl")[0]
    mean = sum(line["policy/loss"] for line in updates[:4]) / 4
    assert first["policy/loss"] == pytest.approx(mean)


def test_its_directory_has_every_file_and_the_configuration(debug_run: DebugRun) -> None:
    written = ("attempts", "metrics", "updates", "samples", "evaluations", "prompt_scores")
    files = {f"{name}.jsonl" for name in written} | {"summary.json", "trace.json"}
    folders = {"logs", "model", "profile", "checkpoints", "export", "export-ema", "tensorboard"}
    assert {path.name for path in debug_run.directory.iterdir()} == files | folders | {"config.yaml", ".lock"}
    resolved = load(debug_run.directory / "config.yaml")
    overrides = [f"run.dir={debug_run.directory}", f"rollout.record={debug_run.recorded}", "checkpoint.every=2"]
    assert resolved == load(Path(DEBUG), [*overrides, "profile.steps=[2]", *PARTS])


def test_no_file_has_a_secret_of_the_environment(debug_run: DebugRun) -> None:
    texts = [path.read_bytes() for path in debug_run.directory.rglob("*") if path.is_file()]
    texts += [debug_run.finished.output.encode(), debug_run.finished.errors.encode()]
    assert len(texts) > 20
    for secret in SECRETS.values():
        assert not any(secret.encode() in text for text in texts)


def test_it_reports_what_the_processes_computed_in_the_profiled_step(debug_run: DebugRun) -> None:
    profile = debug_run.directory / "profile"
    traces = {f"step-2-{process}.json.gz" for process in ("train-rank-0", "rollout-engine-0")}
    assert {path.name for path in profile.iterdir()} == {*traces, "step-2.json"}
    found = json.loads((profile / "step-2.json").read_text())
    trainer, engine = ({call["name"]: call for call in found[name]} for name in ("train rank 0", "rollout engine 0"))
    passes = {f"inference.{name}" for name in ("logprobs", "values", "scores", "build_experience")}
    assert {*passes, "update.update", "sync.send_weights"} <= trainer.keys()
    assert engine.keys() >= {"rollout.generate", "sync.receive_weights"}
    line = lines(debug_run.directory / "metrics.jsonl")[1]
    assert trainer["update.update"]["seconds"] == pytest.approx(line["time/update"], rel=0.2)
    for call, operator in ((trainer["inference.logprobs"], "aten::mm"), (engine["rollout.generate"], "_C::onednn_mm")):
        kernels = {kernel["name"]: kernel for kernel in call["kernels"]}
        assert kernels[operator]["calls"] > 1
        assert sum(kernel["seconds"] for kernel in kernels.values()) == pytest.approx(call["seconds"], rel=0.05)
    for trace in traces:
        assert json.loads(gzip.decompress((profile / trace).read_bytes()))["traceEvents"]
    assert "profile of step 2, rollout engine 0" in debug_run.finished.output


def test_its_status_is_finished(debug_run: DebugRun) -> None:
    found = read_status(debug_run.directory)
    assert (found.state.name, found.progress.step, found.progress.steps) == ("finished", 3, 3)
    (attempt,) = found.attempts
    assert (attempt.number, attempt.step, attempt.host) == (1, 0, socket.gethostname())
    assert attempt.end is not None
    assert (attempt.end.step, attempt.end.reason) == (3, "finished")
    written = [line["time/written"] for line in lines(debug_run.directory / "metrics.jsonl")]
    assert attempt.time < written[0] < written[1] < written[2] < attempt.end.time
    assert found.progress.pace is not None
    assert found.progress.pace.seconds_per_step == pytest.approx((written[2] - written[0]) / 2)
    assert ([saved.step for saved in found.checkpoints][-1], found.unfinished) == (3, None)
    assert not found.troubles
