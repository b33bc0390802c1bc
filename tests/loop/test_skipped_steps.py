"""Skipped optimizer steps and steps without scores end a run; the former leave a batch that can be replayed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import TrainingConfig, load
from megarl.config.schema import Rollout
from megarl.data.prompts import greedy_requests, sample_requests
from megarl.errors import RunError
from megarl.groups.rollouts import Rollouts
from megarl.loop.sampler import Sampled
from megarl.loop.skipped_steps import SkippedBatches, SkippedSteps, write_rollouts, write_rows
from megarl.loop.train import UnscoredSteps
from megarl.rollout.completions import Response, pack_chunk
from megarl.rollout.engine_options import EngineOptions
from megarl.rollout.replay import ReplayingEngine, recorded_steps
from megarl.run.paths import RunPaths
from megarl.run.results import StepResult
from megarl.types import Prompt, SampleRequest, VersionSpan, WorkItem
from tests.config.debug import DEBUG

ROLLOUT = Rollout(devices="0", max_new_tokens=2, max_model_len=4)
CLEAN, SKIPPED = {"policy/skipped": 0.0}, {"policy/skipped": 1.0}


def config_of(directory: Path, *overrides: str, stage: str = "ppo") -> TrainingConfig:
    config = load(DEBUG.with_stem(stage), [f"run.dir={directory}", *overrides])
    assert isinstance(config, TrainingConfig)
    return config


def counted(directory: Path, *overrides: str, stage: str = "ppo") -> SkippedSteps:
    config = config_of(directory, "run.steps=9", *overrides, stage=stage)
    return SkippedSteps(config, RunPaths(directory))


def step(number: int, *updates: dict[str, float]) -> StepResult:
    return StepResult(step=number, metrics={}, updates=updates)


def test_three_optimizer_steps_of_a_role_in_a_row_end_a_run(tmp_path: Path) -> None:
    steps = counted(tmp_path)
    steps.add(step(1, SKIPPED, SKIPPED, CLEAN, SKIPPED))
    steps.add(step(2, {**SKIPPED, "value/skipped": 0.0}))
    steps.add(step(3, {"value/skipped": 1.0}))  # a step without the policy
    with pytest.raises(RunError, match=r"^policy: .* 3 optimizer steps in a row") as caught:
        steps.add(step(4, {**SKIPPED, "value/skipped": 1.0}))
    assert f"rollout.replay={tmp_path}/skipped" in str(caught.value)


def test_the_count_goes_on_when_a_run_resumes(tmp_path: Path) -> None:
    lines = [{"step": 1, **SKIPPED}, {"step": 2, **CLEAN}, {"step": 3, **SKIPPED}, {"step": 4, **SKIPPED}]
    RunPaths(tmp_path).updates.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(RunError, match="3 optimizer steps"):
        counted(tmp_path).add(step(5, SKIPPED))
    counted(tmp_path, "run.max_skipped_steps=4").add(step(5, SKIPPED))


def test_null_never_ends_a_run_and_a_shorter_run_ends_at_its_last_step(tmp_path: Path) -> None:
    steps = counted(tmp_path, "run.max_skipped_steps=null")
    for number in range(1, 9):
        steps.add(step(number, SKIPPED))
    with pytest.raises(RunError, match=f"the rows of these steps are in {tmp_path}"):
        counted(tmp_path, "run.steps=1", stage="sft").add(step(1, {"sft/skipped": 1.0}))


def answered(request: SampleRequest, number: int) -> Response:
    spans = (VersionSpan(start=0, stop=2, version=number, engine_id=0),)
    logprobs = [-0.1 * number, -np.inf]
    return Response(request=request, token_ids=[number, 7], logprobs=logprobs, finished=number % 2 == 0, versions=spans)


def sampled_step(number: int) -> tuple[Any, list[list[SampleRequest]], list[Any]]:
    """A step of two prompts with two samples each, in two chunks, and of their greedy answers in one."""
    prompts = [Prompt(prompt_id=name, token_ids=(1, 2)) for name in ("a/b", "c")]
    asked = sample_requests(prompts, 2, seed=0, step=number)
    requests = [asked[:2], asked[2:], greedy_requests(prompts, step=number)]
    packed = [pack_chunk(i % 2, [answered(r, number) for r in part]) for i, part in enumerate(requests)]
    chunks = [chunk for _, chunk in packed]

    def rollouts(*parts: int) -> Rollouts:
        refs: Any = Refs({index % 2: chunks[index] for index in parts})
        return Rollouts(samples=tuple(info for index in parts for info in packed[index][0]), chunks=refs)

    scoring: Any = None
    return (
        Sampled(prompts=prompts, rollouts=rollouts(0, 1), scoring=scoring, greedy_rollouts=rollouts(2)),
        requests,
        chunks,
    )


class Refs(dict[int, Any]):
    """Chunks without an object store."""

    def only(self, chunks: Any) -> Refs:
        return Refs({chunk: self[chunk] for chunk in chunks})


def replayed(directory: Path, requests: list[SampleRequest]) -> Any:
    engine: Any = object.__new__(ReplayingEngine)
    engine._directory, engine._steps, engine._rollout = directory, recorded_steps(directory), ROLLOUT
    engine._options = EngineOptions(vocab_size=8, device="cpu")
    engine._state = type("State", (), {"usable_version": lambda self: 0})()
    chunks, _ = engine._generate(WorkItem(chunk=0, requests=tuple(requests))).chunk.result()
    return chunks[0]


def test_the_batches_of_the_last_steps_in_a_row_can_be_replayed(tmp_path: Path) -> None:
    batches = SkippedBatches(config_of(tmp_path))
    for number, update in enumerate((SKIPPED, CLEAN, SKIPPED, SKIPPED, CLEAN), start=1):
        sampled, _, _ = sampled_step(number)
        batches.add(number, [CLEAN, update], partial(write_rollouts, sampled, ROLLOUT, None))
    directory = RunPaths(tmp_path).skipped
    assert recorded_steps(directory) == {"3", "4"}
    _, requests, chunks = sampled_step(4)
    for asked, chunk in zip(requests, chunks, strict=True):
        again = replayed(directory, asked)
        assert (again.sample_ids, again.versions) == (chunk.sample_ids, chunk.versions)
        assert again.finished.tolist() == chunk.finished.tolist()
        for name in ("prompt_ids", "response_ids", "rollout_logprobs"):
            assert getattr(again, name).values.tobytes() == getattr(chunk, name).values.tobytes()


def test_the_batches_before_a_resume_stay(tmp_path: Path) -> None:
    """The run resumes after its third step, and skips the fourth; had it skipped the fifth, only that would stay."""
    for number in (2, 3):
        SkippedBatches(config_of(tmp_path, stage="sft")).add(number, [SKIPPED], lambda to: (to / "2").touch())
        lines = [{"step": 2, **SKIPPED}, {"step": 3, **SKIPPED}]
        RunPaths(tmp_path).updates.write_text("".join(f"{json.dumps(line)}\n" for line in lines[: number - 1]))
    for number, left in ((4, {"2", "4"}), (5, {"5"})):
        resumed = SkippedBatches(config_of(tmp_path, stage="sft"))
        resumed.add(number, [SKIPPED], lambda to, name=str(number): (to / name).touch())
        assert {file.name for file in RunPaths(tmp_path).skipped.iterdir()} == left


def test_the_rows_of_a_supervised_step_are_named(tmp_path: Path) -> None:
    batches = SkippedBatches(config_of(tmp_path, stage="sft"))
    sampled, _, _ = sampled_step(6)
    batches.add(6, [{"sft/skipped": 1.0}], partial(write_rows, 6, sampled.rollouts.samples))
    assert json.loads((tmp_path / "skipped" / "step-6.json").read_text()) == {"step": 6, "rows": ["a/b", "c"]}


def test_a_batch_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batches = SkippedBatches(config_of(tmp_path / "missing"))
    batches.add(1, [SKIPPED], lambda _directory: None)
    assert "the batch of step 1 is not in" in capsys.readouterr().err


FAILURE = "reward function 'f' on prompt '3': Traceback\nKeyError: 'answer'"


def unscored_result(step: int, unscored: int) -> StepResult:
    metrics = {"rewards/unscored": unscored, "rollout/samples": 16}
    return StepResult(step=step, metrics=metrics, updates=[], failures=(FAILURE,) if unscored else ())


def limited(*overrides: str, stage: str = "grpo") -> UnscoredSteps:
    return UnscoredSteps(config_of(Path("nowhere"), *overrides, stage=stage))


def test_three_consecutive_steps_without_scores_end_a_run_with_the_traceback() -> None:
    steps = limited("run.steps=9")
    for step, unscored in enumerate([16, 16, 15, 16, 16], start=1):
        steps.add(unscored_result(step, unscored))
    with pytest.raises(RunError, match="no response of the last 3 steps has a score") as caught:
        steps.add(unscored_result(6, 16))
    assert str(caught.value).endswith(FAILURE)


def test_a_shorter_run_without_scores_ends_at_its_last_step() -> None:
    steps = limited("run.steps=1")
    with pytest.raises(RunError, match="the last 1 step has"):
        steps.add(unscored_result(1, 16))


def test_null_allows_steps_without_scores_and_other_stages_have_none() -> None:
    steps = limited("run.steps=9", "reward.max_unscored_steps=null")
    for step in range(1, 10):
        steps.add(unscored_result(step, 16))
    limited(stage="sft").add(StepResult(step=1, metrics={"sft/loss": 1.0}, updates=[]))
