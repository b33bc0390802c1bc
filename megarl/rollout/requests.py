"""Requests to vLLM: sampling parameters, the requests in progress, and turns of conversations."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megarl.decoder_fields import decoder_fields
from megarl.files import read_json
from megarl.types import Pickled, RolloutChunk, SampledTurn, SampleInfo, SampleRequest, TurnAnswer, WorkItem
from megarl.weights.hf_files import read_config

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest

    from megarl.config.schema import Rollout as RolloutConfig


def stop_token_ids(model_dir: str | Path) -> tuple[int, ...]:
    """Returns the ids that end a response, from generation_config.json or else config.json; possibly none.

    Raises OSError or ValueError where a file cannot be read, or has something else there.
    """
    path = Path(model_dir) / "generation_config.json"
    ids = None
    if path.exists():
        generation = read_json(path)
        if isinstance(generation, dict):
            ids = generation.get("eos_token_id")
    if ids is None:
        path = path.with_name("config.json")
        ids = decoder_fields(read_config(model_dir)).get("eos_token_id")
    if ids is None:
        return ()
    if not isinstance(ids, list):
        ids = [ids]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"{path}: eos_token_id is neither a token id nor a list of them; correct it")
    return tuple(ids)


def sampling_settings(rollout: RolloutConfig, kept_max: int | None) -> list[float]:
    """Returns the settings of the distribution of samples, of their log-probabilities, and of recorded ids."""
    truncation = [rollout.top_p, rollout.top_k or 0, rollout.min_p, kept_max or 0]
    return [rollout.temperature, *truncation, rollout.min_new_tokens]


_SEED_MASK = 2**63 - 1


def generation_params(
    rollout: RolloutConfig, request: SampleRequest, stop_token_ids: Sequence[int], *, logprobs: int = 0
) -> SamplingParams:
    """Returns parameters that sample one response, with the log-probability of each of its tokens.

    The log-probabilities are of the distribution that was sampled from: the softmax of the logits
    by the temperature, over the ids in use that top-p, top-k, min-p and `min_new_tokens` leave. A
    greedy response has log-probabilities at temperature 1, or 0 where engines record the ids. A
    response includes the stop token that ended it. vLLM uses the lower 63 bits of the seed, as it
    stores seeds as signed numbers and reads -1 as no seed.

    Args:
        logprobs: number of likeliest tokens that have their log-probabilities too.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=rollout.temperature if request.temperature is None else request.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k or 0,
        min_p=rollout.min_p,
        seed=request.seed & _SEED_MASK,
        min_tokens=rollout.min_new_tokens,
        max_tokens=request.max_new_tokens or rollout.max_new_tokens,
        stop=list(rollout.stop),
        skip_special_tokens=False,  # a stop text may be a special token's
        detokenize=bool(rollout.stop),
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,  # only stop_token_ids end a response, not the tokenizer's end token
        logprobs=logprobs,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> SamplingParams:
    """Returns parameters for the raw log-probabilities of a prompt's tokens; vLLM also generates one token.

    vLLM does not read the prefix cache with `prompt_logprobs`; `skip_reading_prefix_cache` makes
    sure.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        skip_reading_prefix_cache=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class Requests:
    """The requests of a vLLM engine, which has no others, by number; no number is used twice.

    Args:
        adapter: adapter of all of them.
    """

    def __init__(self, llm: LLMEngine, adapter: LoRARequest | None = None) -> None:
        self._llm = llm
        self._adapter = adapter
        self._numbers = itertools.count()
        self._open: dict[int, tuple[Sequence[int], SamplingParams, Callable[[RequestOutput], None]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        salt: str,
        done: Callable[[RequestOutput], None],
    ) -> None:
        """Submits a request.

        Args:
            salt: text; requests with different salts do not share the prefix cache.
            done: called with the output when the request is finished.
        """
        number = next(self._numbers)
        prompt = {"type": "token", "prompt_token_ids": list(token_ids), "cache_salt": salt}
        self._llm.add_request(str(number), cast(Any, prompt), params, lora_request=self._adapter)
        self._open[number] = (token_ids, params, done)

    def step(self) -> None:
        """Runs a step of the engine."""
        for output in self._llm.step():
            if output.finished:
                _, _, done = self._open.pop(int(output.request_id))
                done(cast("RequestOutput", output))

    def restart_without_token(self, salt: str) -> None:
        """Submits the requests that have no token yet again, with another salt."""
        for state in list(self._llm.output_processor.request_states.values()):
            if state.is_prefilling:
                number = state.external_req_id
                token_ids, params, done = self._open.pop(int(number))
                self._llm.abort_request([number])
                self.add(token_ids, params, salt, done)

    def abort(self) -> None:
        """Drops the unfinished requests."""
        self._llm.abort_request([str(number) for number in self._open])
        self._open.clear()


_HEARTBEAT_S = 5.0
"""A call for answers returns after this time, also without any, as long as the engine takes steps."""

Generated = Future[tuple[dict[int, RolloutChunk], list[SampleInfo]]]


class Turns:
    """Requests for turns, and their answers; all methods run in the thread of the engine.

    Args:
        generate: starts the responses of an item.
    """

    def __init__(self, generate: Callable[[WorkItem], Generated]) -> None:
        self._generate = generate
        self._answers: list[TurnAnswer] = []
        self._error: BaseException | None = None
        self._waiting: Future[list[TurnAnswer]] | None = None
        self._since = 0.0

    def start(self, requests: Sequence[tuple[int, Pickled[SampleRequest]]]) -> None:
        """Starts turns, each with its number."""
        for number, request in requests:
            generated = self._generate(WorkItem(chunk=0, requests=(request.value(),)))
            generated.add_done_callback(lambda done, number=number: self._add(number, done))

    def next(self) -> Future[list[TurnAnswer]]:
        """Returns the answers that no earlier call had, as soon as there are any; none for a heartbeat."""
        self._waiting = Future()
        self._since = time.monotonic()
        waiting = self._waiting
        self.step()
        return waiting

    def step(self) -> None:
        """Answers a waiting call with the turns that ended in a step of the engine, or because it has waited long."""
        late = time.monotonic() - self._since > _HEARTBEAT_S
        if self._waiting is None or not (self._answers or self._error is not None or late):
            return
        waiting = self._waiting
        self._waiting = None
        if self._error is not None:
            waiting.set_exception(self._error)
            return
        answers = self._answers
        self._answers = []
        waiting.set_result(answers)

    def _add(self, number: int, done: Generated) -> None:
        error = done.exception()
        if error is not None:
            self._error = error
        else:
            chunks, _ = done.result()
            turn = SampledTurn.of(chunks[0])
            tokens = len(turn.token_ids)
            self._answers.append(TurnAnswer(number=number, tokens=tokens, turn=Pickled.of(turn)))
