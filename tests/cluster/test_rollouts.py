"""Engines share the samples of a step and return them by reference."""

from __future__ import annotations

import pytest

from megarl.cluster.rollouts import RolloutGroup, even_parts
from megarl.cluster.session import Session
from megarl.config import PPOConfig
from megarl.types import Prompt, SampleRequest
from tests.cluster.conftest import FAKE_ENGINE


def test_parts_differ_by_at_most_one() -> None:
    assert even_parts(10, 4) == [2, 3, 2, 3]
    assert even_parts(3, 3) == [1, 1, 1]


@pytest.fixture(scope="module")
def engines(session: Session, config: PPOConfig) -> RolloutGroup:
    return RolloutGroup(session, config.rollout, "nowhere", vocab_size=100, device="cpu", target=FAKE_ENGINE)


@pytest.mark.parametrize(("samples", "chunks"), [(7, 4), (5, 16), (1, 8)])
def test_every_sample_is_where_its_info_says(engines: RolloutGroup, samples: int, chunks: int) -> None:
    requests = [
        SampleRequest(sample_id=f"s{i}", prompt=Prompt(prompt_id=f"p{i}", token_ids=tuple(range(i, 2 * i + 1))), seed=i)
        for i in range(samples)
    ]
    rollouts = engines.generate(requests, chunks)
    assert [info.sample_id for info in rollouts.samples] == [request.sample_id for request in requests]
    assert len(rollouts.chunks) == min(samples, chunks)
    for info, request in zip(rollouts.samples, requests, strict=True):
        chunk = rollouts.chunks[info.chunk]
        assert chunk.sample_ids[info.row] == info.sample_id
        assert tuple(chunk.prompt_ids[info.row]) == request.prompt.token_ids
    writers = {spans[0].engine_id for chunk in range(len(rollouts.chunks)) for spans in rollouts.chunks[chunk].versions}
    assert writers == ({0, 1} if samples > 1 else {1})
