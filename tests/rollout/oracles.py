"""Comparisons, and the results of transformers for the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from megarl.types import Ragged, RolloutChunk, SampleRequest
from tests.rollout.conftest import Answers, rollout_config
from tests.rollout.models import USED_VOCAB, VOCAB


def assert_same(got: Answers, expected: Answers, *, atol: float = 0.0) -> None:
    """The same tokens; log-probabilities within atol nats, bit for bit where that is 0."""
    for ours, theirs in zip(got.chunk.response_ids, expected.chunk.response_ids, strict=True):
        np.testing.assert_array_equal(ours, theirs, "sampled tokens")
    assert_close(got.chunk.rollout_logprobs, expected.chunk.rollout_logprobs, atol, "rollout_logprobs")
    assert_close(got.raw, expected.raw, atol, "raw log-probabilities")


def assert_close(got: Ragged, expected: Ragged, atol: float, what: str) -> None:
    np.testing.assert_array_equal(got.lengths, expected.lengths, what)
    np.testing.assert_allclose(got.values, expected.values, rtol=0, atol=atol, err_msg=what)


@lru_cache(maxsize=4)
def _load(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def hf_logits(model_dir: Path, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[T, VOCAB] logits of each sequence, by transformers."""
    model = _load(model_dir)
    with torch.no_grad():
        return [model(torch.tensor([list(ids)])).logits[0] for ids in sequences]


def hf_logits_in_parts(parts: Sequence[tuple[Path, int]], ids: Sequence[int]) -> torch.Tensor:
    """[T, VOCAB] logits of a sequence: each model reads on up to its end, with the keys and values of those before."""
    cache, logits, start = DynamicCache(), [], 0
    for model_dir, end in parts:
        with torch.no_grad():
            logits.append(_load(model_dir)(torch.tensor([list(ids[start:end])]), past_key_values=cache).logits[0])
        start = end
    return torch.cat(logits)


def hf_raw_logprobs(model_dir: Path, sequences: Sequence[Sequence[int]]) -> Ragged:
    """The result of RolloutEngine.logprobs, by transformers; unused ids have no probability."""
    rows = []
    for ids, logits in zip(sequences, hf_logits(model_dir, sequences), strict=True):
        logprobs = logits[:-1, :USED_VOCAB].log_softmax(-1)
        rows.append(logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).numpy())
    return Ragged.from_rows(rows, np.float32)


def hf_greedy(model_dir: Path, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """The likeliest response, token by token, its end token included, by transformers' ``generate``."""
    unused = list(range(USED_VOCAB, VOCAB))
    ids = torch.tensor([list(prompt)])
    whole = _load(model_dir).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        suppress_tokens=unused,
        pad_token_id=0,
    )
    return whole[0, len(prompt) :].tolist()


def truncated_logprobs(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> torch.Tensor:
    """[USED_VOCAB] log-probabilities of what temperature, min-p, top-k and then top-p leave of one position's logits.

    Top-p keeps the fewest likeliest ids that together reach the probability.
    """
    scaled = (logits[:USED_VOCAB].double() / temperature).tolist()
    ranked = sorted(range(len(scaled)), key=lambda i: -scaled[i])[:top_k]
    ranked = [i for i in ranked if np.exp(scaled[i] - scaled[ranked[0]]) >= min_p]
    weights = [float(np.exp(scaled[i] - scaled[ranked[0]])) for i in ranked]
    kept: list[int] = []
    reached = 0.0
    for i, weight in zip(ranked, weights, strict=True):
        if reached >= top_p:
            break
        kept.append(i)
        reached += weight / sum(weights)
    total = np.log(sum(np.exp(scaled[i]) for i in kept))
    result = torch.full((len(scaled),), -torch.inf, dtype=torch.float64)
    for i in kept:
        result[i] = scaled[i] - total
    return result


def version_logprobs(
    model_dirs: Sequence[Path], asked: Sequence[SampleRequest], chunks: Sequence[RolloutChunk], *, keep: bool
) -> list[np.ndarray]:
    """Log-probabilities of responses, a chunk each, by transformers with the weights of each token's version.

    A token's logits are those of the position before it.

    Args:
        model_dirs: by version.
        keep: a version has read what came since its update, and uses the keys and values of those before; else it has
            read the whole sequence.
    """
    wholes = [[*request.prompt.token_ids, *chunk.response_ids[0]] for request, chunk in zip(asked, chunks, strict=True)]
    by_version = [] if keep else [hf_logits(model_dir, wholes) for model_dir in model_dirs]
    rows: list[np.ndarray] = []
    for row, (request, chunk) in enumerate(zip(asked, chunks, strict=True)):
        before, spans = len(request.prompt.token_ids) - 1, chunk.versions[0]
        if keep:
            parts = [(model_dirs[span.version], before + span.stop) for span in spans]
            logits = hf_logits_in_parts(parts, wholes[row])[before:]
        else:
            parts = [by_version[span.version][row][before + span.start : before + span.stop] for span in spans]
            logits = torch.cat(parts)
        config = rollout_config()
        greedy = request.temperature == 0
        sampling = (1.0, USED_VOCAB, 1.0) if greedy else (config.temperature, config.top_k, config.top_p)
        tokens = torch.from_numpy(chunk.response_ids[0]).long()
        logprobs = torch.stack([truncated_logprobs(each, *sampling) for each in logits])
        values = logprobs[torch.arange(len(tokens)), tokens]
        assert not greedy or bool((values > logprobs.amax(1) - 1e-4).all()), "greedy tokens are the likeliest"
        rows.append(values.numpy())
    return rows
