"""Log-probabilities under the reference that are kept in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megarl.data.batches import text_batch
from megarl.data.training_texts import TrainingText
from megarl.stages.dpo.reference_logprobs import ReferenceLogprobs


def pair(key: str, prompt: list[int], *responses: list[int]) -> TrainingText:
    ids = [np.array(response, dtype=np.int32) for response in responses]
    return TrainingText(key=key, prompt_ids=np.array(prompt, dtype=np.int32), responses=tuple(ids))


def test_rows_are_found_by_their_tokens_in_the_files_of_an_interrupted_pass(tmp_path: Path) -> None:
    texts = [pair("0", [1, 2], [3], [4]), pair("1", [1], [2, 3], [4]), pair("2", [5], [3], [6])]
    first = ReferenceLogprobs(tmp_path)
    assert first.missing(texts) == texts
    _, chunks = text_batch(texts[:2], 2)
    first.add(chunks, [np.array([-1.1, -2.0]), np.array([-3.0, -4.0])])

    again = ReferenceLogprobs(tmp_path)
    assert again.missing(texts) == [texts[2]]
    _, rest = text_batch(texts[2:], 1)
    again.add(rest, [np.array([-5.0, -6.0])])

    whole = ReferenceLogprobs(tmp_path)
    copies = [pair("7", [5], [3], [6]), pair("8", [1, 2], [3], [4])]
    assert whole.missing([*texts, *copies]) == []
    _, (chunk,) = text_batch(copies, 1)
    assert whole.column(chunk).tolist() == np.array([-5.0, -6.0, -1.1, -2.0], dtype=np.float32).tolist()
    assert whole.missing([pair("9", [1], [2, 3], [6])]), "a prompt with another response"
    assert whole.missing([pair("10", [1, 2, 3], [4], [5])]), "the same tokens, divided elsewhere"
