"""The recorded ids of which a token was sampled are those that top-p, top-k and min-p leave, by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import SamplingMask

from megarl.rollout.kept_sets import kept_sets, with_sampling_mask
from megarl.types import RolloutChunk
from tests.rollout import in_process
from tests.rollout.conftest import requests, start
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import USED_VOCAB, VOCAB
from tests.rollout.oracles import hf_logits, truncated_logprobs

ALL: dict[str, Any] = {"top_p": 1.0, "top_k": None}
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "top_p": ({**ALL, "top_p": 0.8}, 512),
    "top_k": ({**ALL, "top_k": 20}, 20),
    "min_p": ({**ALL, "min_p": 0.05}, 512),
    "all of them": ({"top_p": 0.9, "top_k": 30, "min_p": 0.02, "temperature": 0.8}, 30),
    "too many": ({**ALL, "top_p": 0.8}, 12),
}
"""Settings of ``rollout``, and the most ids that are recorded."""


@pytest.mark.e2e
@pytest.mark.parametrize("name", SETTINGS)
def test_recorded_ids_are_those_of_which_a_token_was_sampled(
    process: EngineProcess, models: Mapping[str, Path], name: str
) -> None:
    changes, kept_max = SETTINGS[name]
    start(process, models["qwen2"], weights="files", kept_max=kept_max, **changes)
    _, (chunk,) = process.apply(in_process.generate, requests(12), [12])
    fields = {"temperature": 0.7, "min_p": 0.0, **changes}
    fields["top_k"] = fields["top_k"] or USED_VOCAB
    counts = check_kept(chunk, models["qwen2"], kept_max, **fields)
    assert (0 in counts) == (name == "too many")
    assert len(set(counts)) > 1 or name == "top_k"


def check_kept(chunk: RolloutChunk, model_dir: Path, kept_max: int, **fields: Any) -> list[int]:
    """Returns the numbers of ids."""
    assert chunk.kept_counts is not None
    assert chunk.kept_ids is not None
    whole = [[*prompt, *response] for prompt, response in zip(chunk.prompt_ids, chunk.response_ids, strict=True)]
    for row, logits in enumerate(hf_logits(model_dir, whole)):
        counts = chunk.kept_counts[row]
        ids = np.split(chunk.kept_ids[row], np.cumsum(counts)[:-1])
        assert len(counts) == len(chunk.response_ids[row])
        for position, token in enumerate(chunk.response_ids[row]):
            logprobs = truncated_logprobs(logits[len(chunk.prompt_ids[row]) + position - 1], **fields)
            kept = logprobs.isfinite().nonzero().flatten().tolist()
            logprob = chunk.rollout_logprobs[row][position]
            if len(kept) > kept_max:
                assert counts[position] == logprob == 0
            else:
                assert sorted(ids[position].tolist()) == kept
                assert logprob == pytest.approx(float(logprobs[token]), abs=1e-5)
    return chunk.kept_counts.values.tolist()


def test_vllms_masks_are_read_like_log_probabilities() -> None:
    """By its own classes; a GPU alone makes masks."""
    flat = FlatLogprobs()
    far = -np.inf
    for ids, logprobs in (([7, 7, 3, 9], [-0.5, -0.5, -1.0, far]), ([2, 5, 2, 8], [-1.5, -0.7, -1.5, -2.0])):
        flat.append_fast(ids, logprobs, iter(range(4)), [None] * 4)
    told = SimpleNamespace(logprobs=flat, sampling_mask=None)
    expected = {"logprobs": [-0.5, 0.0], "kept_counts": [2, 0], "kept_ids": [7, 3]}
    assert found_in(told, 2) == expected
    sampled = FlatLogprobs()
    for token, logprob in ((7, -0.5), (2, -1.5)):
        sampled.append_fast([token], [logprob], iter([1]), [None])
    masked = SimpleNamespace(logprobs=sampled, sampling_mask=SamplingMask([[3, 7], [2, 5, 8]]))
    assert found_in(masked, 2) == {**expected, "kept_ids": [3, 7]}


def found_in(completion: Any, kept_max: int) -> dict[str, list[float]]:
    return {name: np.asarray(values).tolist() for name, values in kept_sets(completion, kept_max).items()}


@pytest.mark.parametrize(
    ("asked", "temperature", "top_k"), [((0.7, 0), 0.7, VOCAB), ((0.7, 5), 0.7, 5), ((0, 0), 1, 1)]
)
def test_a_request_for_masks_has_the_same_distribution(
    asked: tuple[float, int], temperature: float, top_k: int
) -> None:
    params = with_sampling_mask(SamplingParams(temperature=asked[0], top_k=asked[1]), VOCAB)
    assert (params.temperature, params.top_k) == (temperature, top_k)
