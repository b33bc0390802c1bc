"""samples.jsonl: what a reader of the file gets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from megarl.config import load
from megarl.run.paths import RunPaths
from megarl.run.report import EvaluationReporter
from megarl.run.results import ShownSample
from tests.loop.test_model_directory import DEBUG

SAMPLE = ShownSample(
    sample_id="p1/0",
    prompt_id="p1",
    prompt="up ba:",
    response="ab",
    finished=True,
    score=0.5,
    scores={"reward_model": 0.25, "exact_match": 1.0},
)


def test_every_sample_is_a_line_and_a_second_writer_appends(tmp_path: Path) -> None:
    config, paths = load(DEBUG, ["tracking.tensorboard=false"]), RunPaths(tmp_path)
    for step in (1, 2):
        with EvaluationReporter(config, paths) as reporter:
            others = [SAMPLE, replace(SAMPLE, sample_id="p1/1", prompt=(5, 6), finished=False)]
            reporter.write_samples(step, "train", others)
            reporter.write_samples(step, "evaluation", [SAMPLE])
    lines = [json.loads(line) for line in paths.samples.read_text().splitlines()]
    assert [(line["step"], line["kind"], line["sample_id"]) for line in lines] == [
        (step, kind, sample)
        for step in (1, 2)
        for kind, sample in (("train", "p1/0"), ("train", "p1/1"), ("evaluation", "p1/0"))
    ]
    assert lines[0] == {
        "step": 1,
        "kind": "train",
        "sample_id": "p1/0",
        "prompt_id": "p1",
        "prompt": "up ba:",
        "response": "ab",
        "finished": True,
        "score": 0.5,
        "scores": {"reward_model": 0.25, "exact_match": 1.0},
    }
    assert lines[1]["prompt"] == [5, 6]
