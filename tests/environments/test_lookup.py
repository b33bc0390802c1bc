"""The example's environment: a player who asks wins, and one who does not loses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.lookup.prepare import prepare
from megarl.conversations import environment_process
from megarl.conversations.chat_session import TurnLimits
from megarl.data.prompts import task_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.files import read_lines
from megarl.rollout.completions import Response, pack_chunk
from megarl.types import SampledTurn, SampleRequest, VersionSpan
from tests.conversations.test_conversations import Engine, held

pytestmark = pytest.mark.process


class Player(Engine):
    """Asks for the key that it was told, if it asks, and then says what it was told."""

    def __init__(self, model: Path, *, asks: bool) -> None:
        super().__init__()
        self._tokenizer, self._asks = load_tokenizer(model), asks

    def answer(self, request: SampleRequest) -> SampledTurn:
        text = self._tokenizer.decode(request.prompt.token_ids)
        says = f"?{text[0]}" if len(text) == 2 and self._asks else text[-3:-1]
        ids = [*self._tokenizer.encode(says)[1:], self._tokenizer.end_token_id]
        versions = (VersionSpan(start=0, stop=len(ids), version=0, engine_id=0),)
        zeros = [0.0] * len(ids)
        response = Response(request=request, token_ids=ids, logprobs=zeros, finished=True, versions=versions)
        return SampledTurn.of(pack_chunk(0, [response])[1])


def test_the_question_is_needed_and_its_answer_has_the_form_of_the_demonstrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_process, "_HEARTBEAT_S", 0.1)  # the last conversations wait for it
    prepare(tmp_path)
    model, limits = tmp_path / "model", TurnLimits(context=32, turn=4, turns=3, min_turn=0)
    settings = {"name": "examples.lookup.table:Table"}
    tasks = task_prompts(8, first=4096)
    won, infos = held(model, Player(model, asks=True), settings, tasks, limits)
    lost, _ = held(model, Player(model, asks=False), settings, tasks, limits)
    assert (won.rewards.tolist(), lost.rewards.tolist()) == ([1.0] * 8, [0.0] * 8)
    assert all(info.outcome is not None and info.outcome.metrics == {"asked": 1.0} for info in infos)
    tokenizer = load_tokenizer(model)
    shown = {
        (len(tokenizer.encode(row["prompt"])), row["prompt"][0]): row["prompt"]
        for row in read_lines(tmp_path / "demonstrations.jsonl")
        if len(row["prompt"]) == 2 or row["prompt"][0] == row["prompt"][3]
    }
    for row in range(8):
        ids = np.concatenate([won.prompt_ids[row], won.response_ids[row]]).tolist()
        text = tokenizer.decode(ids, special=True).removeprefix("<bos>")
        assert shown[3, text[0]] == text[:2]
        asked, told = shown[len(ids) - 3, text[0]], text.index("=") + 1
        assert tokenizer.encode(asked[: asked.index("=") + 1] + text[told : told + 3]) == ids[:-3]
