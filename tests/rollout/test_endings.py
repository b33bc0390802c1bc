"""The end of a response: stop tokens, stop texts, and a minimum number of tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.types import RolloutChunk
from tests.rollout import in_process
from tests.rollout.conftest import NEW_TOKENS, Answers, ask, requests, rollout_config, start
from tests.rollout.engine_process import EngineProcess, RemoteError
from tests.rollout.models import END, VOCAB, save_tokenizer, text_of
from tests.rollout.oracles import hf_logits, truncated_logprobs

pytestmark = [pytest.mark.e2e]

LEAST = 6


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def cut(ids: Sequence[int], *, texts: Sequence[str], tokens: Collection[int]) -> tuple[int, bool]:
    """The length of a response up to its end, and whether anything ends it, by a naive loop."""
    for count in range(1, len(ids) + 1):
        text = text_of(ids[:count])
        if ids[count - 1] in tokens or any(text.endswith(stop) for stop in texts):
            return count, True
    return len(ids), False


def test_stop_texts_and_tokens_end_a_response(
    process: EngineProcess, models: Mapping[str, Path], fresh: Mapping[str, Answers], tokenizer: Path
) -> None:
    """A seed draws the same tokens until something ends them."""
    whole = fresh["qwen2"].chunk
    ids = [row.tolist() for row in whole.response_ids]
    long = [row for row in ids if len(row) == NEW_TOKENS]
    texts, tokens = (text_of(long[0][3:5]), text_of(long[1][7:8])), (long[2][5],)
    start(process, models["qwen2"], weights="files", tokenizer=tokenizer, stop=texts, stop_token_ids=tokens)
    chunk = ask(process).chunk
    ends = [cut(row, texts=texts, tokens=(*tokens, END)) for row in ids]
    assert any(count < len(row) for (count, _), row in zip(ends, ids, strict=True))
    for row, (count, ended) in enumerate(ends):
        assert chunk.response_ids[row].tolist() == ids[row][:count]
        assert chunk.finished[row] == ended
        np.testing.assert_array_equal(chunk.rollout_logprobs[row], whole.rollout_logprobs[row][:count])


def test_no_end_token_is_sampled_before_the_minimum_length(
    process: EngineProcess, models: Mapping[str, Path], fresh: Mapping[str, Answers]
) -> None:
    """It is neither sampled nor part of the log-probabilities before it is allowed."""
    frequent = int(np.bincount(fresh["qwen2"].chunk.response_ids.values).argmax())
    ends = {frequent, END}
    start(process, models["qwen2"], weights="files", min_new_tokens=LEAST, stop_token_ids=(frequent,))
    _, (chunk,) = process.apply(in_process.generate, requests(40), [40])
    early = [cut(row.tolist(), texts=(), tokens=ends)[0] < LEAST for row in fresh["qwen2"].chunk.response_ids]
    assert any(early), "without it there are shorter ones"
    assert any(chunk.finished)
    for row, finished in zip(chunk.response_ids, chunk.finished, strict=True):
        assert len(row) > LEAST
        assert ends.isdisjoint(row[:-1])
        assert finished == (row[-1] in ends)
    _check_logprobs(chunk, models["qwen2"], ends)


def _check_logprobs(chunk: RolloutChunk, model_dir: Path, ends: Collection[int]) -> None:
    """Of responses in which the first LEAST tokens were drawn without the ends."""
    config = rollout_config()
    whole = [[*p, *r] for p, r in zip(chunk.prompt_ids, chunk.response_ids, strict=True)][:8]
    for row, logits in enumerate(hf_logits(model_dir, whole)):
        prompt_tokens = len(chunk.prompt_ids[row])
        for position, token in enumerate(chunk.response_ids[row]):
            own = logits[prompt_tokens + position - 1].clone()
            if position < LEAST:
                own[list(ends)] = -torch.inf
            logprobs = truncated_logprobs(own, config.temperature, config.top_k, config.top_p)
            assert chunk.rollout_logprobs[row][position] == pytest.approx(float(logprobs[token]), abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": ("x",)}, "ValueError: rollout.stop is .'x'.; reading texts needs a tokenizer"),
        ({"stop_token_ids": (VOCAB,)}, f"ValueError: stop token {VOCAB} is not one of the model's {VOCAB} ids"),
    ],
)
def test_impossible_stop_settings_are_refused(
    process: EngineProcess, models: Mapping[str, Path], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(RemoteError, match=message):
        start(process, models["qwen2"], weights="files", **changes)
