"""Requests on their way through vLLM."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput, SamplingParams


class Requests:
    """A vLLM engine's requests by number; no number is used twice.

    Args:
        llm: the engine, of which nobody else asks anything.
    """

    def __init__(self, llm: LLMEngine) -> None:
        self._llm = llm
        self._numbers = itertools.count()
        self._open: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def room(self) -> int:
        """Further requests that vLLM would run at once."""
        return self._llm.vllm_config.scheduler_config.max_num_seqs - len(self)

    def add(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Submits a request; its number."""
        number = next(self._numbers)
        self._llm.add_request(str(number), {"type": "token", "prompt_token_ids": list(token_ids)}, params)
        self._open.add(number)
        return number

    def step(self) -> Iterator[tuple[int, RequestOutput]]:
        """Moves all requests on by a token, or a piece of a prompt; those that it finished."""
        for output in self._llm.step():
            if output.finished:
                number = int(output.request_id)
                self._open.discard(number)
                yield number, cast("RequestOutput", output)

    def abort(self) -> None:
        """Forgets the requests that are not finished."""
        self._llm.abort_request([str(number) for number in self._open])
        self._open.clear()
