"""Engines that answer at once, and conversations that take their next turn at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace

from megarl.config.schema import EnvironmentSettings
from megarl.conversations.chat_session import TurnLimits
from megarl.conversations.conversation import Branch, Conversation
from megarl.conversations.environment_process import EnvironmentProcess
from megarl.remote import remote
from megarl.rollout.completions import Response, pack_chunk
from megarl.rollout.requests import Turns
from megarl.types import Pickled, Prompt, RolloutChunk, SampleInfo, SampleRequest, TurnAnswer, VersionSpan, WorkItem

ROOM = 1 << 20
"""Tokens of a conversation at most, and conversations of a process."""


class InstantEngine:
    """Answers every request with one id."""

    def __init__(self, model_dir: str, rollout: object, options: object, *, engine_id: int) -> None:
        self._turns = Turns(self._generate)
        self._span = VersionSpan(start=0, stop=1, version=0, engine_id=engine_id)

    @remote(phase="start")
    def start(self) -> int:
        return 512

    @remote(phase="rollout")
    def sample_turns(self, requests: Sequence[tuple[int, Pickled[SampleRequest]]]) -> None:
        self._turns.start(requests)

    @remote(phase="rollout")
    def sampled_turns(self) -> Future[list[TurnAnswer]]:
        return self._turns.next()

    def _generate(self, item: WorkItem) -> Future[tuple[dict[int, RolloutChunk], list[SampleInfo]]]:
        responses: list[Response] = []
        for request in item.requests:
            responses.append(
                Response(request=request, token_ids=[1], logprobs=[0.0], finished=True, versions=(self._span,))
            )
        infos, chunk = pack_chunk(item.chunk, responses)
        answer: Future[tuple[dict[int, RolloutChunk], list[SampleInfo]]] = Future()
        answer.set_result(({item.chunk: chunk}, infos))
        return answer

    def step(self) -> bool:
        self._turns.step()
        return False


class InstantEnvironment(EnvironmentProcess):
    """Conversations of a fixed number of turns, each of which adds the same number of ids."""

    def __init__(self, turns: int, tokens: int) -> None:
        settings = EnvironmentSettings(name="instant", concurrency=ROOM)
        super().__init__(settings, "", {}, TurnLimits(context=ROOM, turn=1, turns=turns))
        self._count = turns
        self._tokens = tokens

    @remote(phase="start")
    def start(self, host: str = "") -> None:
        """Loads nothing."""

    async def _converse(self, request: SampleRequest) -> Conversation:
        ids = request.prompt.token_ids
        branch = Branch(prompt=ids)
        for turn in range(self._count):
            prompt = Prompt(prompt_id=request.prompt.prompt_id, token_ids=branch.ids)
            asked = SampleRequest(sample_id=f"{request.sample_id}/turn-{turn}", prompt=prompt, seed=turn)
            branch.add(await self._sample(request.sample_id, asked))
            branch.give(range(self._tokens))
        return Conversation(request=request, branches=[branch])

    @remote(phase="rollout")
    def generate(self, item: WorkItem) -> Future[tuple[dict[int, RolloutChunk], list[SampleInfo]]]:
        self._tokenizer = SimpleNamespace(end_token_id=0)  # pyright: ignore[reportAttributeAccessIssue]
        return super().generate(item)
