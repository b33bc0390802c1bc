"""Recorded samples are replayed exactly, however they are divided into chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.schema import Rollout
from megarl.rollout.completions import Response
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.engine_options import EngineOptions
from megarl.rollout.replay import RecordingEngine, read_response, recorded_steps, write_sample
from megarl.types import Prompt, Ragged, RolloutChunk, SampleRequest, VersionSpan

CHUNK = RolloutChunk(
    sample_ids=("1/a b/0", "1/../x/1"),
    prompt_ids=Ragged.from_rows([[5, 6, 7], [8]], np.int32),
    response_ids=Ragged.from_rows([[1], [2, 3, 0]], np.int32),
    rollout_logprobs=Ragged.from_rows([[-0.1], [-0.2, -3.0000001, -1e-8]], np.float32),
    finished=np.array([False, True]),
    versions=(
        (VersionSpan(start=0, stop=1, version=4, engine_id=1),),
        (VersionSpan(start=0, stop=2, version=4, engine_id=0), VersionSpan(start=2, stop=3, version=5, engine_id=0)),
    ),
)


ROLLOUT = Rollout(devices="0", max_new_tokens=4, max_model_len=8)


def request(row: int, token_ids: tuple[int, ...]) -> SampleRequest:
    return SampleRequest(sample_id=CHUNK.sample_ids[row], prompt=Prompt(prompt_id="p", token_ids=token_ids), seed=0)


@pytest.mark.parametrize(("row", "prompt"), [(0, (5, 6, 7)), (1, (8,))])
def test_a_recorded_sample_is_replayed_bit_for_bit(tmp_path: Path, row: int, prompt: tuple[int, ...]) -> None:
    write_sample(tmp_path, CHUNK, row, ROLLOUT)
    assert [path.parent for path in tmp_path.iterdir()] == [tmp_path]
    response = read_response(tmp_path, request(row, prompt), ROLLOUT)
    assert list(response.token_ids) == CHUNK.response_ids[row].tolist()
    assert np.array(response.logprobs, np.float32).tobytes() == CHUNK.rollout_logprobs[row].tobytes()
    assert response.finished == CHUNK.finished[row]
    assert response.versions == CHUNK.versions[row]


def test_a_recorded_conversation_keeps_its_mask(tmp_path: Path) -> None:
    mask = Ragged.from_rows([[True], [False, True, True, False, True]], np.bool_)
    ids = Ragged.from_rows([[1], [9, 2, 3, 8, 0]], np.int32)
    write_sample(tmp_path, replace(CHUNK, response_ids=ids, loss_mask=mask), 1, ROLLOUT)
    response = read_response(tmp_path, request(1, (8,)), ROLLOUT)
    assert (response.token_ids, response.loss_mask) == ([9, 2, 3, 8, 0], [False, True, True, False, True])
    assert len(response.logprobs) == 3
    write_sample(tmp_path, CHUNK, 0, ROLLOUT)
    assert read_response(tmp_path, request(0, (5, 6, 7)), ROLLOUT).loss_mask is None


def test_recorded_ids_of_which_tokens_were_sampled_are_replayed(tmp_path: Path) -> None:
    counts = Ragged.from_rows([[1], [2, 0, 1]], np.int32)
    ids = Ragged.from_rows([[1], [2, 4, 0]], np.int32)
    routes = Ragged.from_rows([[0], [3, 7, 255]], np.uint8)
    write_sample(tmp_path, replace(CHUNK, kept_counts=counts, kept_ids=ids, routes=routes), 1, ROLLOUT)
    response = read_response(tmp_path, request(1, (8,)), ROLLOUT)
    assert (response.kept_counts, response.kept_ids) == ([2, 0, 1], [2, 4, 0])
    assert response.routes is not None
    assert (response.routes.dtype, response.routes.tolist()) == (np.uint8, [3, 7, 255])


def test_an_engine_records_only_training_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutEngine, "_response", lambda _engine, _request, output, _version: output)
    engine = object.__new__(RecordingEngine)
    engine._rollout = ROLLOUT.model_copy(update={"record": str(tmp_path)})
    engine._options = EngineOptions(vocab_size=8, device="cpu")
    prompt = Prompt(prompt_id="p", token_ids=(1,))
    for name in ("0/a/0", "1/a/0", "0/b/0", "1/b/0"):
        asked = SampleRequest(sample_id=name, prompt=prompt, seed=0)
        response = Response(request=asked, token_ids=[2], logprobs=[-0.5], finished=True, versions=CHUNK.versions[0])
        assert engine._response(asked, response, 0) is response
    assert {path.name for path in tmp_path.iterdir()} == {"1%2Fa%2F0.npz", "1%2Fb%2F0.npz"}


def test_a_request_that_was_not_recorded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no sample '1/a b/0': record and replay with the same run\.seed"):
        read_response(tmp_path, request(0, (5, 6, 7)), ROLLOUT)
    write_sample(tmp_path, CHUNK, 0, ROLLOUT)
    with pytest.raises(ValueError, match="answers another prompt than 'p'"):
        read_response(tmp_path, request(0, (5, 6, 8)), ROLLOUT)


def test_steps_are_replayed_and_evaluations_are_not(tmp_path: Path) -> None:
    """Evaluations have the same ids after every step: played back, they would hide that the weights have changed."""
    assert recorded_steps(tmp_path) == set()
    write_sample(tmp_path, CHUNK, 0, ROLLOUT)
    write_sample(tmp_path, CHUNK, 1, ROLLOUT)
    write_sample(tmp_path, replace(CHUNK, sample_ids=("0/a/0", "0/b/0")), 0, ROLLOUT)
    assert recorded_steps(tmp_path) == {"1"}


@pytest.mark.parametrize(
    "change", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"min_new_tokens": 2}]
)
def test_log_probabilities_of_another_distribution_are_refused(tmp_path: Path, change: dict[str, float]) -> None:
    write_sample(tmp_path, CHUNK, 0, ROLLOUT.model_copy(update=change))
    with pytest.raises(ValueError, match="log-probabilities of another distribution"):
        read_response(tmp_path, request(0, (5, 6, 7)), ROLLOUT)
    assert read_response(tmp_path, request(0, (5, 6, 7)), ROLLOUT.model_copy(update=change))


@pytest.mark.parametrize(("recorded", "wanted"), [(None, 256), (256, 8), (256, None)])
def test_samples_without_the_ids_that_a_run_reads_are_refused(
    tmp_path: Path, recorded: int | None, wanted: int | None
) -> None:
    write_sample(tmp_path, CHUNK, 0, ROLLOUT, recorded)
    with pytest.raises(ValueError, match=r"log-probabilities of another distribution .* kept_max"):
        read_response(tmp_path, request(0, (5, 6, 7)), ROLLOUT, wanted)
