"""Conversations in a process of environments, with engines that are made here: what is trained is what was sampled."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.sort_letters.checkpoint import write_checkpoint
from megarl.config.schema import EnvironmentSettings
from megarl.conversations import environment_process
from megarl.conversations.chat_session import ChatSession, TurnLimits
from megarl.conversations.conversation import Branch, Conversation
from megarl.conversations.environment_process import EnvironmentProcess, TurnRequest, pack_conversations
from megarl.environments.environment import Action
from megarl.rollout.completions import Response, pack_chunk, select_rows
from megarl.types import (
    Pickled,
    Prompt,
    SampledTurn,
    SampleInfo,
    SampleRequest,
    TurnAnswer,
    VersionSpan,
    WorkItem,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

TEMPLATE = (
    "{% for m in messages %}{{ '<bos>' + m['role'] + ': ' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant: ' }}{% endif %}"
)
END = 2
"""The id of <eos>."""


COUNTING = "{{ messages | length }}" + TEMPLATE
"""Begins with something that every further message changes, as some templates rewrite earlier turns."""


def checkpoint(directory: Path, template: str) -> Path:
    """Writes a tokenizer of characters, with a chat template."""
    write_checkpoint(directory, 0)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return directory


@pytest.fixture(autouse=True)
def heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for turns returns soon: the last conversations have none while other turns wait for the engine here."""
    monkeypatch.setattr(environment_process, "_HEARTBEAT_S", 0.1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), TEMPLATE)


class Engine:
    """Samples turns at random, from the seed of the request, and keeps a record of them."""

    def __init__(self, *, cut: float = 0.0) -> None:
        self._cut = cut
        self.record: dict[str, tuple[SampleRequest, Response]] = {}

    def answer(self, request: SampleRequest) -> SampledTurn:
        chance = random.Random(request.seed)
        assert request.max_new_tokens is not None
        finished = chance.random() >= self._cut and request.max_new_tokens > 1
        length = chance.randint(1, min(4, request.max_new_tokens - 1)) if finished else request.max_new_tokens
        ids = [chance.randrange(10, 90) for _ in range(length)] + [END] * finished
        response = Response(
            request=request,
            token_ids=ids,
            logprobs=[-chance.random() for _ in ids],
            finished=finished,
            versions=(VersionSpan(start=0, stop=len(ids), version=chance.randrange(9), engine_id=0),),
        )
        assert request.sample_id not in self.record, "a turn is sampled once"
        self.record[request.sample_id] = request, response
        return SampledTurn.of(pack_chunk(0, [response])[1])


def held(
    tokenizer: Path, engine: Any, settings: Mapping[str, Any], prompts: Sequence[Prompt], limits: TurnLimits
) -> tuple[Any, list[SampleInfo]]:
    """Holds a conversation about each prompt, in one item; turns are answered in random order.

    Returns the chunk, whose optional columns are there.
    """
    process = EnvironmentProcess(EnvironmentSettings(**settings), str(tokenizer), {}, limits)
    requests = [
        SampleRequest(sample_id=f"1/{prompt.prompt_id}/0", prompt=prompt, seed=7 + index)
        for index, prompt in enumerate(prompts)
    ]
    chance = random.Random(0)
    process.start()
    try:
        done = process.generate(WorkItem(chunk=3, requests=tuple(requests)))
        waiting: list[TurnRequest] = []
        while not done.done():
            waiting += process.next_turns().result(timeout=30)
            if waiting:
                turn = waiting.pop(chance.randrange(len(waiting)))
                sampled = Pickled.of(engine.answer(turn.request.value()))
                process.answer([TurnAnswer(number=turn.number, tokens=0, turn=sampled)])
        chunks, infos = done.result(timeout=0)
    finally:
        process.close()
    return chunks[3], infos


TASKS = [Prompt(prompt_id=str(index), token_ids=(), fields={"number": index}) for index in range(6)]
CHATS = [
    Prompt(prompt_id=str(index), token_ids=(5,), messages=[{"role": "user", "content": f"hello {index}"}])
    for index in range(6)
]


def assert_exact(chunk: Any, infos: Sequence[SampleInfo], engine: Engine) -> int:
    """Asserts that every row is its turns as the engine sampled them; returns the number of turns."""
    seen, turns = 0, Counter[str]()
    for row, info in enumerate(infos):
        ids = [*chunk.prompt_ids[row].tolist(), *chunk.response_ids[row].tolist()]
        mask = [False] * len(chunk.prompt_ids[row]) + chunk.loss_mask[row].tolist()
        logprobs: list[float] = []
        versions: list[int] = []
        place = 0
        for number in range(len(chunk.turns[row])):
            request, response = engine.record[f"{info.conversation}/turn-{turns[info.conversation]}"]
            turns[info.conversation] += 1
            start = len(request.prompt.token_ids)
            assert ids[:start] == list(request.prompt.token_ids), "the prompt of a turn is all that was before"
            assert ids[start : start + len(response.token_ids)] == list(response.token_ids)
            assert not any(mask[place:start])
            place = start + len(response.token_ids)
            assert all(mask[start:place])
            logprobs += response.logprobs
            versions += [response.versions[0].version] * len(response.token_ids)
            assert chunk.turns[row][number] == len(logprobs)
            seen += 1
        assert place == len(ids), "a row ends with its last turn"
        assert chunk.rollout_logprobs[row].tolist() == np.float32(logprobs).tolist()
        spans = chunk.versions[row]
        assert [span.version for span in spans for _ in range(span.start, span.stop)] == versions
        assert info.response_tokens == len(logprobs)
        assert info.tokens == len(ids)
    assert seen == len(engine.record), "every turn that was sampled is in a row"
    return seen


@pytest.mark.parametrize(
    ("name", "prompts"), [("Letters", TASKS), ("Chat", CHATS)], ids=["texts that follow", "messages"]
)
def test_rows_are_turns_as_they_were_sampled(tokenizer: Path, name: str, prompts: Sequence[Prompt]) -> None:
    engine = Engine(cut=0.2)
    limits = TurnLimits(context=120, turn=10, turns=9)
    chunk, infos = held(tokenizer, engine, {"name": f"tests.conversations.worlds:{name}"}, prompts, limits)
    assert [info.prompt_id for info in infos] == [prompt.prompt_id for prompt in prompts]
    assert assert_exact(chunk, infos, engine) > len(prompts)
    assert np.isfinite(chunk.rewards).all()
    np.testing.assert_allclose(chunk.rewards, [row.sum() for row in chunk.turn_rewards], rtol=1e-6)
    assert not chunk.finished.all(), "some are cut off"
    assert chunk.finished.any()
    assert limits_of([info for info in infos if info.finished]) == {None}
    assert limits_of([info for info in infos if not info.finished]) == {"max_new_tokens"}


def limits_of(infos: Sequence[SampleInfo]) -> set[str | None]:
    return {info.outcome.limit for info in infos if info.outcome is not None}


@pytest.mark.parametrize(
    ("limits", "reached"),
    [
        (TurnLimits(context=40, turn=10, turns=99), "max_model_len"),
        (TurnLimits(context=200, turn=10, turns=2), "max_turns"),
    ],
)
def test_a_conversation_ends_at_its_limits(tokenizer: Path, limits: TurnLimits, reached: str) -> None:
    engine = Engine()
    settings = {"name": "tests.conversations.worlds:Letters", "args": {"turns": 99}}
    chunk, infos = held(tokenizer, engine, settings, TASKS, limits)
    assert_exact(chunk, infos, engine)
    assert not chunk.finished.any()
    assert limits_of(infos) == {reached}
    assert max(info.tokens for info in infos) <= limits.context
    if reached == "max_turns":
        assert set(chunk.turns.lengths) == {2}
    else:
        assert min(info.tokens for info in infos) > 20


def test_a_template_that_rewrites_earlier_turns_begins_branches(tmp_path: Path) -> None:
    engine = Engine()
    settings = {"name": "tests.conversations.worlds:Chat", "args": {"turns": 3}}
    limits = TurnLimits(context=200, turn=10, turns=9)
    chunk, infos = held(checkpoint(tmp_path, COUNTING), engine, settings, CHATS, limits)
    assert_exact(chunk, infos, engine)
    assert [info.conversation for info in infos] == [f"1/{prompt.prompt_id}/0" for prompt in CHATS for _ in range(3)]
    assert [info.sample_id for info in infos[:3]] == ["1/0/0", "1/0/0#1", "1/0/0#2"]
    for first in range(0, len(infos), 3):
        own = [chunk.turn_rewards[first + branch] for branch in range(3)]
        total = chunk.rewards[first]
        assert chunk.rewards[first : first + 3].tolist() == [total] * 3
        assert sum(rewards.sum() for rewards in own) == pytest.approx(total)
        assert all(rewards.any() for rewards in own), "each branch has its own rewards"


def turn_of(*ids: int) -> SampledTurn:
    return SampledTurn(token_ids=ids, logprobs=np.zeros(len(ids), np.float32), finished=True, versions=())


def session_of(sample: Any, min_turn: int = 0) -> ChatSession:
    """A session whose turns have no text."""

    def read(ids: Sequence[int], finished: bool, **_: Any) -> Action:
        return Action(text="", content="", token_ids=tuple(ids), finished=finished)

    renderer: Any = SimpleNamespace(read=read)
    request = SampleRequest(sample_id="1/p/0", prompt=TASKS[0], seed=5)
    limits = TurnLimits(context=50, turn=5, turns=9, min_turn=min_turn)
    return ChatSession(Conversation(request=request), renderer, sample, limits)


async def test_branches_are_in_the_order_of_their_last_turns_and_seeds_do_not_depend_on_it() -> None:
    async def talk(order: Sequence[int]) -> tuple[list[tuple[int, ...]], dict[tuple[int, ...], int]]:
        seeds: dict[tuple[int, ...], int] = {}

        async def sample(request: SampleRequest) -> SampledTurn:
            seeds[request.prompt.token_ids] = request.seed
            return turn_of(7)

        session = session_of(sample)
        for first in order:
            await session.complete([first, 1])
        await session.complete([order[0], 1, 7, 2])
        return [branch.prompt for branch in session.conversation.branches], seeds

    one, seeds = await talk([3, 4])
    other, again = await talk([4, 3])
    assert one == [(4, 1), (3, 1)], "the branch that was continued has the last turn"
    assert other == [(3, 1), (4, 1)]
    assert {prompt: seeds[prompt] for prompt in ((3, 1), (4, 1))} == {p: again[p] for p in ((3, 1), (4, 1))}
    assert len(set(seeds.values())) == 3


async def test_of_branches_with_the_same_ids_the_newest_goes_on() -> None:
    answers = iter([(0.1, 7), (0.2, 7), (0.3, 9)])

    async def sample(_request: SampleRequest) -> SampledTurn:
        logprob, token = next(answers)
        return replace(turn_of(token), logprobs=np.array([-logprob], np.float32))

    session = session_of(sample)
    for ids in ([3], [3], [3, 7, 2]):
        await session.complete(ids)
    older, newer = session.conversation.branches
    assert (older.response, newer.response) == ([7], [7, 2, 9])
    assert newer.logprobs == pytest.approx([-0.2, -0.3]), "a client that asks again goes on from the last answer"


async def test_of_branches_that_a_prompt_begins_with_the_longest_goes_on() -> None:
    answers = iter([7, 9, 7, 8])

    async def sample(_request: SampleRequest) -> SampledTurn:
        return turn_of(next(answers))

    session = session_of(sample)
    for ids in ([3], [3, 7, 2], [3], [3, 7, 2, 9, 5]):
        await session.complete(ids)
    assert [branch.response for branch in session.conversation.branches] == [[7], [7, 2, 9, 5, 8]]


async def test_a_turn_needs_room_for_the_tokens_that_it_has_at_least() -> None:
    assert await session_of(None, min_turn=3).complete([1], max_tokens=2) is None


def test_ids_of_which_turns_were_sampled_go_with_their_branch() -> None:
    """Also where another conversation had no turn."""
    request = SampleRequest(sample_id="1/p/0", prompt=TASKS[0], seed=5)
    talked, silent = Conversation(request=request), Conversation(request=request)
    branch = Branch(prompt=(1, 2))
    for token, kept in ((7, [7, 8]), (9, [3, 9, 4])):
        counts = np.array([len(kept)], np.int32)
        branch.give([5])
        branch.add(replace(turn_of(token), kept_counts=counts, kept_ids=np.array(kept, np.int32)))
    talked.branches.append(branch)
    chunk, _ = pack_conversations([silent, talked], filler=0)
    assert chunk.kept_counts is not None
    assert chunk.kept_ids is not None
    assert [row.tolist() for row in chunk.kept_counts] == [[], [2, 3]]
    assert [row.tolist() for row in chunk.kept_ids] == [[], [7, 8, 3, 9, 4]]
    again = SampledTurn.of(select_rows({0: chunk}, [(0, 1)]))
    assert again.kept_ids is not None
    assert again.kept_ids.tolist() == [7, 8, 3, 9, 4]
