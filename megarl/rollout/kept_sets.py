"""The ids from which top-p, top-k and min-p let a token be sampled, as vLLM reports them.

On a GPU, vLLM (0.32) returns them (``return_sampling_mask``). On a CPU they are those with a
log-probability, of the likeliest ones that a request asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm import CompletionOutput, SamplingParams


def with_sampling_mask(params: SamplingParams, vocab: int) -> SamplingParams:
    """Returns parameters of the same distribution that vLLM takes with ``return_sampling_mask``.

    It wants a temperature and a top-k: the likeliest token is the only one of the top 1, and none
    is beyond the vocabulary's size.
    """
    if params.temperature == 0:
        params.temperature = 1.0
        params.top_k = 1
    elif params.top_k <= 0:
        params.top_k = vocab
    return params


def kept_sets(completion: CompletionOutput, kept_max: int) -> dict[str, Any]:
    """Returns ``logprobs``, ``kept_counts`` and ``kept_ids`` of a response; see ``RolloutChunk``."""
    flat: Any = completion.logprobs
    starts = np.array(flat.start_indices, dtype=np.int64)
    logprobs = np.array(flat.logprobs, dtype=np.float32)[starts]
    if completion.sampling_mask is not None:
        rows = completion.sampling_mask.token_ids
        counts = np.array([len(row) for row in rows], dtype=np.int64)
        ids = np.array([token for row in rows for token in row], dtype=np.int32)
    else:
        counts, ids = _with_logprobs(flat, starts)
    fits = counts <= kept_max
    kept = ids[np.repeat(fits, counts)]
    return {
        "logprobs": np.where(fits, logprobs, 0.0).tolist(),
        "kept_counts": np.where(fits, counts, 0),
        "kept_ids": kept,
    }


def _with_logprobs(flat: Any, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of ids of each token, [T], and the ids.

    The first entry of a token is the sampled one, which is repeated if it is one of the likeliest.
    """
    ids = np.array(flat.token_ids, dtype=np.int32)
    lengths = np.diff(starts, append=len(ids))
    token = np.repeat(np.arange(len(starts)), lengths)
    is_repeated = ids == np.repeat(ids[starts], lengths)
    is_repeated[starts] = False
    kept = np.isfinite(flat.logprobs) & ~is_repeated
    return np.bincount(token[kept], minlength=len(starts)), ids[kept]
