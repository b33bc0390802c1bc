"""Two steps of reward-ranked fine-tuning as a user runs them, against the naive program from the same rollouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.data.schedule import mini_batch_members
from megarl.types import SampleInfo
from tests.e2e.runs import finish, lines, started
from tests.oracle import models, selection, supervised
from tests.oracle.adam import AdamSettings
from tests.oracle.models import Sample

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS, EPOCHS, MINI_BATCHES = 2, 2, 2
LINEAR = AdamSettings(lr=1e-3, schedule=lambda update: 1 - update / (STEPS * EPOCHS * MINI_BATCHES))
"""One course over the whole run: a step does not begin it again."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run and its rollouts are; the whole vocabulary is in use, as the naive program has it."""
    made = tmp_path_factory.mktemp("raft")
    settings = [f"run.dir={made}/run", f"rollout.record={made}/recorded", "model.vocab_size=100"]
    with started(["train", "configs/debug/raft.yaml", *settings]) as program:
        done = finish(*program)
    assert done.status == 0, done.errors
    done.assert_clean()
    return made


def recorded(directory: Path, step: int) -> list[Sample]:
    """The rollouts of a step with their scores, those of a prompt next to each other and in order."""
    config = json.loads((directory / "run/model/config.json").read_text())
    body = {
        name: own for name, own in load_file(directory / "run/model/model.safetensors").items() if "lm_head" not in name
    }
    head = 0.02 * torch.randn(1, config["hidden_size"], generator=torch.Generator().manual_seed(0))
    reward = models.headed_model(config, {**body, "score.weight": head})
    found = []
    for file in directory.glob(f"recorded/{step}%2F*.npz"):
        with np.load(file) as stored:
            sample = Sample(
                sample_id=unquote(file.stem),
                prompt_ids=stored["prompt_ids"].tolist(),
                response_ids=stored["response_ids"].tolist(),
                finished=bool(stored["finished"]),
                group=int(unquote(file.stem).split("/")[1].removeprefix("random-")),
            )
        found.append(replace(sample, score=models.sequence_score(reward, sample)))
    return sorted(found, key=lambda sample: (sample.group, sample.sample_id))


def selected(samples: Sequence[Sample]) -> list[Sample]:
    """Of each prompt the best response that has ended."""
    return selection.best_of_each([sample if sample.finished else replace(sample, score=None) for sample in samples])


def mini_batches(samples: Sequence[Sample], step: int) -> list[list[Sample]]:
    """What each optimizer step learns."""
    by_id = {sample.sample_id: sample for sample in samples}
    infos = [
        SampleInfo(sample_id=name, prompt_id="", chunk=0, row=row, prompt_tokens=1, response_tokens=1, finished=True)
        for row, name in enumerate(by_id)
    ]
    return [
        [by_id[info.sample_id] for info in members]
        for epoch in range(EPOCHS)
        for members in mini_batch_members(infos, MINI_BATCHES, seed=1, step=step, epoch=epoch)
    ]


def test_it_selects_and_learns_what_the_naive_program_does(directory: Path) -> None:
    config = json.loads((directory / "run/model/config.json").read_text())
    start = load_file(directory / "run/model/model.safetensors")
    rollouts = [recorded(directory, step) for step in range(1, STEPS + 1)]
    assert [len(own) for own in rollouts] == [24, 24]
    chosen = [selected(own) for own in rollouts]
    assert any(not sample.finished for own in rollouts for sample in own), "none was to be discarded"
    batches = [batch for step, own in enumerate(chosen, 1) for batch in mini_batches(own, step)]
    steps, model = supervised.fine_tune(models.causal_lm(config, start), batches, LINEAR)
    for line, step in zip(lines(directory / "run/updates.jsonl"), steps, strict=True):
        assert line["raft/loss"] == pytest.approx(step.loss, rel=1e-5)
        assert line["raft/grad_norm"] == pytest.approx(step.grad_norm, rel=1e-4)
        assert line["raft/entropy"] == pytest.approx(step.metrics["entropy"], rel=1e-5)
        assert line["raft/lr"] == pytest.approx(1e-3 * (1 - (line["update"] - 1) / 8))
    found = load_file(directory / "run/export/model.safetensors")
    for name, expected in model.named_parameters():
        moved = (expected - start[name]).norm().item()
        assert (found[name] - expected).norm().item() <= 1e-3 * moved, name
    for line, own, best in zip(lines(directory / "run/metrics.jsonl"), rollouts, chosen, strict=True):
        assert line["raft/selected"] == len(best)
        assert line["raft/selected_score"] == pytest.approx(mean(best), rel=1e-4)
        assert line["objective/score"] == pytest.approx(mean(own), rel=1e-4), "of all responses, not of the best"


def mean(samples: Sequence[Sample]) -> float:
    return float(np.mean([sample.score for sample in samples]))
