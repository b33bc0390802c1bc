"""Random samples as rollout chunks, with the driver's records of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.data.packing import sample_infos
from megarl.experience.padded_batch import Columns
from megarl.experience.records import SampleScores
from megarl.types import Ragged, RolloutChunk, SampleInfo, VersionSpan


def alone(vector: Any) -> Any:
    """One rank's reduction."""
    return vector


def random_chunks(
    chunks: int = 4,
    rows: int = 3,
    vocab: int = 100,
    max_prompt: int = 7,
    min_response: int = 1,
    max_response: int = 9,
    seed: int = 0,
) -> tuple[list[RolloutChunk], list[SampleInfo]]:
    """Chunks of random tokens; lengths vary, those of prompts from 1 token up."""
    rng = np.random.default_rng(seed)
    made, infos = [], []
    for chunk in range(chunks):
        prompts = [rng.integers(vocab, size=rng.integers(1, max_prompt + 1)) for _ in range(rows)]
        responses = [rng.integers(vocab, size=rng.integers(min_response, max_response + 1)) for _ in range(rows)]
        ids = tuple(f"{chunk * rows + row}:0" for row in range(rows))
        finished = rng.integers(2, size=rows).astype(bool)
        drawn = RolloutChunk(
            sample_ids=ids,
            prompt_ids=Ragged.from_rows(prompts, np.int32),
            response_ids=Ragged.from_rows(responses, np.int32),
            rollout_logprobs=Ragged.from_rows([np.zeros(len(r)) for r in responses], np.float32),
            finished=finished,
            versions=tuple((VersionSpan(start=0, stop=len(r), version=0, engine_id=0),) for r in responses),
        )
        made.append(drawn)
        infos += sample_infos(chunk, drawn, [name.split(":")[0] for name in ids])
    return made, infos


def conversations(chunks: Sequence[RolloutChunk], seed: int = 0) -> list[RolloutChunk]:
    """The same sampled tokens, with up to three given ones before the first, between them and after the last."""
    rng = np.random.default_rng(seed)
    made = []
    for chunk in chunks:
        rows, masks = [], []
        for sampled in chunk.response_ids:
            before = rng.integers(-2, 4, size=len(sampled) + 1).clip(0)
            mask = [own for gap in before for own in [False] * gap + [True]][:-1]
            ids = rng.integers(100, size=len(mask))
            ids[mask] = sampled
            rows.append(ids)
            masks.append(mask)
        ragged = Ragged.from_rows(rows, np.int32)
        made.append(replace(chunk, response_ids=ragged, loss_mask=Ragged.from_rows(masks, np.bool_)))
    return made


def with_kept(chunks: Sequence[RolloutChunk], vocab: int = 100, seed: int = 0) -> list[RolloutChunk]:
    """The same tokens, each sampled of up to nine ids, or of too many."""
    rng = np.random.default_rng(seed)
    made = []
    for chunk in chunks:
        counts, ids = [], []
        for row, sampled in enumerate(chunk.response_ids):
            if chunk.loss_mask is not None:
                sampled = sampled[chunk.loss_mask[row]]
            kept = []
            for token in sampled:
                others = np.setdiff1d(rng.choice(vocab, size=rng.integers(9), replace=False), [token])
                kept.append(rng.permutation([*others, token]) if rng.random() < 0.8 else others[:0])
            counts.append([len(own) for own in kept])
            ids.append(np.concatenate([np.zeros(0, np.int32), *kept]))
        columns = {"kept_counts": Ragged.from_rows(counts, np.int32), "kept_ids": Ragged.from_rows(ids, np.int32)}
        made.append(replace(chunk, **columns))
    return made


def with_given(infos: Sequence[SampleInfo], chunks: Sequence[RolloutChunk]) -> list[SampleInfo]:
    """The driver's records, with the numbers of given tokens."""
    lengths = [len(chunks[info.chunk].response_ids[info.row]) for info in infos]
    return [replace(info, given_tokens=n - info.response_tokens) for info, n in zip(infos, lengths, strict=True)]


def columns_of(
    scores: Mapping[int, np.ndarray],
    *,
    old: Any = None,
    ref: Any = None,
    values: Any = None,
    dense: Any = None,
    outcomes: Mapping[int, np.ndarray] | None = None,
    untrained: frozenset[tuple[int, int]] = frozenset(),
) -> Columns:
    """Columns of samples with these scores, by chunk; the samples of a chunk are of one prompt.

    Args:
        old, ref, values, dense: columns of tokens.
        outcomes: of the samples.
        untrained: (chunk, row) of samples that the policy is not trained on.
    """
    order = sorted(scores)
    rows = [(chunk, row) for chunk in order for row in range(len(scores[chunk]))]
    chunks = np.array([chunk for chunk, _ in rows], np.int64)
    samples = SampleScores(
        chunks=chunks,
        scores=np.concatenate([scores[chunk] for chunk in order]).astype(np.float32),
        groups=chunks,
        sequence_advantages=None
        if outcomes is None
        else np.concatenate([outcomes[i] for i in order]).astype(np.float32),
        actor_mask=np.array([row not in untrained for row in rows]),
    )
    return Columns(samples=samples, old_logprobs=old, ref_logprobs=ref, values=values, dense=dense)
