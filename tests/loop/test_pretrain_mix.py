"""Pretraining texts in the actor's optimizer steps: their order, the tokens that count, and resuming."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.cluster.ray_worker import ChunkRefs
from megarl.config import load
from megarl.data.schedule import step_schedule
from megarl.data.training_texts import TrainingText
from megarl.loop.update import PretrainMix, Updater
from megarl.stages.ppo.config import PPOConfig
from megarl.types import Schedule
from tests.config.debug import debug
from tests.loop.answers import info

TEXTS = [
    TrainingText(key=str(i), prompt_ids=np.arange(2, dtype=np.int32), responses=(np.arange(i + 1, dtype=np.int32),))
    for i in range(5)
]


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkRefs, "put", lambda chunks: dict(enumerate(chunks)))


def mixture(*overrides: str) -> PretrainMix:
    fields = ["ptx.data=owner/texts", "ptx.max_tokens=8", "ptx.sequences_per_mini_batch=3", "ptx.coef=0.5"]
    config = load("configs/debug/ppo.yaml", [*fields, *overrides])
    assert isinstance(config, PPOConfig)
    assert config.ptx is not None
    return PretrainMix(config, config.ptx, TEXTS)


def steps(count: int, mixed: PretrainMix) -> tuple[Schedule, ...]:
    sample = info("a", "a", 0, prompt_tokens=3)
    return tuple(step_schedule([sample], mixed._layout, 16) for _ in range(count))


def taken(schedule: Schedule, chunks: Any) -> list[tuple[int, int]]:
    """Tokens of each text of a step, and those that count."""
    rows = [row for rank in schedule.ranks for pack in rank.packs for row in pack]
    for row in rows:
        assert len(chunks[row.chunk].prompt_ids[row.row]) + len(chunks[row.chunk].response_ids[row.row]) == row.tokens
    return sorted((row.tokens, row.response_tokens) for row in rows)


def test_every_step_takes_the_next_texts() -> None:
    mixed = mixture()
    lengthened, texts = mixed.next(steps(5, mixed))
    seen: list[tuple[int, int]] = []
    for own, along in zip(lengthened, texts.schedules, strict=True):
        assert len({rank.pack_tokens for schedule in (own, along) for rank in schedule.ranks}) == 1
        found = taken(along, texts.chunks)
        assert len(found) == 3
        assert along.ranks[0].total_response_tokens == sum(counted for _, counted in found)
        seen += found
    every = [(i + 3, i + 2) for i in range(5)]  # all tokens but the first
    assert sorted(seen) == sorted(3 * every), "15 texts are three times all of them"


def test_only_response_tokens_count_if_configured() -> None:
    mixed = mixture("ptx.loss_on=response")
    _, texts = mixed.next(steps(5, mixed))
    found = [row for along in texts.schedules for row in taken(along, texts.chunks)]
    assert sorted(found) == sorted(3 * [(i + 3, i + 1) for i in range(5)])


def updater(mixed: PretrainMix) -> Updater:
    parts: Any = SimpleNamespace()
    return Updater(debug(), parts, {"actor": parts}, mixed, parts)


def test_a_resumed_run_continues_with_the_next_text() -> None:
    straight, first, second = mixture(), mixture(), mixture()
    straight.next(steps(2, straight))
    first.next(steps(2, first))
    updater(second).load(json.loads(json.dumps(updater(first).state())))
    one, other = (mixed.next(steps(3, mixed))[1] for mixed in (straight, second))
    assert [taken(along, one.chunks) for along in one.schedules] == [
        taken(along, other.chunks) for along in other.schedules
    ]
