"""Packing responses into chunks."""

from __future__ import annotations

import numpy as np

from megarl.rollout.chunks import Response, into_chunks
from megarl.types import Prompt, SampleInfo, SampleRequest, VersionSpan


def response(name: str, prompt: tuple[int, ...], tokens: list[int], *, finished: bool) -> Response:
    request = SampleRequest(sample_id=name, prompt=Prompt(prompt_id=f"of {name}", token_ids=prompt), seed=0)
    span = VersionSpan(start=0, stop=len(tokens), version=4, engine_id=0)
    return Response(
        request=request, token_ids=tokens, logprobs=[-0.5 * t for t in tokens], finished=finished, versions=(span,)
    )


def test_samples_are_where_their_info_says() -> None:
    a = response("a", (1, 2), [3], finished=True)
    b = response("b", (4,), [5, 6], finished=False)
    c = response("c", (7,), [8], finished=True)
    infos, (first, second) = into_chunks([a, b, c], [1, 2])
    assert infos == [
        SampleInfo(sample_id="a", prompt_id="of a", chunk=0, row=0, prompt_tokens=2, response_tokens=1, finished=True),
        SampleInfo(sample_id="b", prompt_id="of b", chunk=1, row=0, prompt_tokens=1, response_tokens=2, finished=False),
        SampleInfo(sample_id="c", prompt_id="of c", chunk=1, row=1, prompt_tokens=1, response_tokens=1, finished=True),
    ]
    assert first.sample_ids == ("a",)
    assert first.prompt_ids.values.tolist() == [1, 2]
    assert second.sample_ids == ("b", "c")
    assert [row.tolist() for row in second.response_ids] == [[5, 6], [8]]
    assert [row.tolist() for row in second.rollout_logprobs] == [[-2.5, -3.0], [-4.0]]
    assert second.finished.tolist() == [False, True]
    assert second.versions == (b.versions, c.versions)
    assert (second.response_ids.values.dtype, second.rollout_logprobs.values.dtype) == (np.int32, np.float32)


def test_an_empty_chunk_has_no_rows() -> None:
    infos, (chunk,) = into_chunks([], [0])
    assert infos == []
    assert len(chunk.response_ids) == len(chunk.finished) == 0
