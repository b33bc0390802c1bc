"""The built-in environments without tools, turn by turn."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from megarl.environments.environment import Action, EnvironmentTask
from megarl.environments.text_environments import ReasoningGym, UserTurns


def said(text: str) -> Action:
    return Action(text=text, content=text, token_ids=(), finished=True)


def test_the_user_says_what_the_row_has() -> None:
    told = EnvironmentTask(prompt_id="0", fields={"user_turns": ["a", "b"]})
    environment = UserTurns()
    assert environment.reset(told, 0) == [{"role": "user", "content": "a"}]
    assert environment.step(said("1")).messages == [{"role": "user", "content": "b"}]
    assert environment.step(said("2")).done
    greeted = EnvironmentTask(prompt_id="0", messages=[{"role": "user", "content": "hi"}], fields=told.fields)
    assert environment.reset(greeted, 0) == greeted.messages
    assert environment.step(said("1")).messages == [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="no column 'turns'; it has: user_turns"):
        UserTurns("turns").reset(told, 0)
    with pytest.raises(ValueError, match="neither a prompt nor a text in user_turns"):
        UserTurns().reset(EnvironmentTask(prompt_id="0", fields={"user_turns": []}), 0)


def test_tasks_of_reasoning_gym_are_made_by_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sums:
        def __init__(self, seed: int, size: int, terms: list[int]) -> None:
            self._seed, self._terms = seed, sum(terms)
            assert size > 10**6

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {
                "question": f"{index} + {self._seed} + {self._terms}?",
                "answer": str(index + self._seed + self._terms),
            }

        def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
            return float(answer == entry["answer"])

    package = ModuleType("reasoning_gym")
    package.create_dataset = lambda name, **options: {"sums": Sums}[name](**options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    environment = ReasoningGym("sums", seed=5, options={"terms": [3, 4]})
    task = EnvironmentTask(prompt_id="0", messages=[{"role": "system", "content": "be brief"}], fields={"index": 30})
    assert environment.reset(task, 0) == [*task.messages, {"role": "user", "content": "30 + 5 + 7?"}]
    rewards = [
        environment.step(said(text)).reward for text in ("42", " 42\n", "<answer>41</answer> <answer>42</answer>", "41")
    ]
    assert rewards == [1, 1, 1, 0]
