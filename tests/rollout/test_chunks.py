"""Packing responses into chunks."""

from __future__ import annotations

import numpy as np

from megarl.rollout.chunks import Response, into_chunk
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
    infos, chunk = into_chunk(7, [a, b])
    assert infos == [
        SampleInfo(sample_id="a", prompt_id="of a", chunk=7, row=0, prompt_tokens=2, response_tokens=1, finished=True),
        SampleInfo(sample_id="b", prompt_id="of b", chunk=7, row=1, prompt_tokens=1, response_tokens=2, finished=False),
    ]
    assert chunk.sample_ids == ("a", "b")
    assert [row.tolist() for row in chunk.prompt_ids] == [[1, 2], [4]]
    assert [row.tolist() for row in chunk.response_ids] == [[3], [5, 6]]
    assert [row.tolist() for row in chunk.rollout_logprobs] == [[-1.5], [-2.5, -3.0]]
    assert chunk.finished.tolist() == [True, False]
    assert chunk.versions == (a.versions, b.versions)
    assert (chunk.response_ids.values.dtype, chunk.rollout_logprobs.values.dtype) == (np.int32, np.float32)
