"""A vLLM engine that generates rollouts and takes its weights from the trainer, shard by shard."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from megarl.rollout.chunks import Response, into_chunks
from megarl.rollout.environment import set_vllm_environment
from megarl.rollout.sampling import generation_params, scoring_params
from megarl.rollout.stop_tokens import stop_token_ids
from megarl.types import Ragged, RolloutChunk, SampleInfo, SampleRequest, VersionSpan
from megarl.weights.files import read_config
from megarl.weights.regions import ShardMap
from megarl.weights.specs import model_spec

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput, SamplingParams

    from megarl.config.schema import Rollout as RolloutConfig
    from megarl.resharding import SyncSpec, SyncStats
    from megarl.rollout.worker import Outcome

_MIB = 2**20
_BLOCK_TOKENS = 32


class RolloutEngine:
    """One engine in this process; its tensor-parallel ranks are worker processes where there are several.

    Weights have a version from the first committed sync on, or 0 where they are loaded from files. Until then, and
    after a sync that failed, the engine refuses to generate. vLLM takes over the process (default process group,
    random state, thread settings), so nothing else that uses torch may live in it.

    Args:
        model_dir: Hugging Face directory; config.json is enough where the weights come by sync.
        rollout: sampling, lengths and memory.
        engine_id: this engine among those of the run.
        vocab_size: only ids below it are sampled; at most the config's vocab_size.
        device: ``cuda`` or ``cpu``.
        tokenizer: Hugging Face directory of the tokenizer that reads ``rollout.stop``.
        weights: ``sync`` starts without any, ``files`` with those of the directory.
    """

    def __init__(
        self,
        model_dir: str | Path,
        rollout: RolloutConfig,
        *,
        engine_id: int,
        vocab_size: int,
        device: str,
        tokenizer: str | None = None,
        weights: Literal["sync", "files"] = "sync",
    ) -> None:
        self._model_dir = str(model_dir)
        self._rollout = rollout
        self._engine_id = engine_id
        self._vocab_size = vocab_size
        self._device = device
        self._tokenizer = tokenizer
        self._weights = weights
        self._spec = model_spec(read_config(model_dir))
        self._stop_token_ids = tuple({*stop_token_ids(model_dir), *rollout.stop_token_ids})
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._llm: LLMEngine | None = None
        self._version: int | None = None
        self._poisoned = False
        vocab = self._spec.dims.vocab
        if vocab_size > vocab:
            raise ValueError(f"vocab_size is {vocab_size}; the model has {vocab} ids: lower it")
        if self._stop_token_ids and max(self._stop_token_ids) >= vocab:
            raise ValueError(f"stop token {max(self._stop_token_ids)} is not one of the model's {vocab} ids: remove it")
        if rollout.stop and tokenizer is None:
            raise ValueError(f"rollout.stop is {list(rollout.stop)}; reading texts needs a tokenizer: name one")

    @property
    def version(self) -> int | None:
        """The policy version of the weights; None before the first."""
        return self._version

    def start(self) -> None:
        """Starts vLLM and its workers, and checks that their parameters are those that a sync will write."""
        self._scratch = tempfile.TemporaryDirectory(prefix="megarl-engine-")
        set_vllm_environment(self._device, self._scratch.name)
        from vllm import EngineArgs, LLMEngine

        cpu, tp = self._device == "cpu", self._rollout.tp
        arguments = EngineArgs(
            model=self._model_dir,
            tokenizer=self._tokenizer,
            skip_tokenizer_init=not self._rollout.stop,
            dtype=cast(Any, self._spec.dtype),  # by name: vLLM's "auto" serves float32 models in half precision
            load_format="auto" if self._weights == "files" else "dummy",
            tensor_parallel_size=tp,
            distributed_executor_backend="uni" if tp == 1 else "mp",
            worker_extension_cls="megarl.rollout.worker.WorkerExtension",
            enforce_eager=cpu,
            max_model_len=self._rollout.max_model_len + 1,  # vLLM generates a token when it scores a full sequence
            block_size=_BLOCK_TOKENS,  # the CPU kernels' smallest; short prompts share prefixes
            kv_cache_memory_bytes=self._rollout.kv_cache_mib * _MIB,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        self._llm = LLMEngine.from_engine_args(arguments)
        self._on_workers("prepare", self.shard_maps(), self._vocab_size)
        self._version = 0 if self._weights == "files" else None

    def shard_maps(self) -> list[ShardMap]:
        """What each tensor-parallel rank holds, in vLLM's names."""
        return [self._spec.vllm_map(self._rollout.tp, rank) for rank in range(self._rollout.tp)]

    def connect(self, sync: SyncSpec, ranks: Sequence[int]) -> None:
        """Connects every rank with the trainer's; waits for all ranks of the sync. Ends an earlier connection.

        Args:
            sync: with this engine's parts of the plan.
            ranks: this engine's ranks in the sync, by tensor-parallel rank.
        """
        self._on_workers("connect", sync, tuple(ranks), -1 if self._version is None else self._version)

    def receive_weights(self, version: int) -> list[SyncStats]:
        """Takes part in a sync: every rank writes its shard as it arrives.

        Waits for the trainer's ranks. Where it fails before anything is written, the engine keeps its weights;
        afterwards it refuses to be used until another sync succeeds.

        Args:
            version: of the policy; above the one before.

        Returns:
            What each rank received.

        Raises:
            RuntimeError: the sync was aborted, with the reason of the rank that failed first.
        """
        outcomes = self._outcomes("receive", version)
        if any(outcome.error for outcome in outcomes):
            self._poisoned = self._poisoned or not all(self._on_workers("consistent"))
        stats = self._values("receive", outcomes)
        self._commit(version)
        return stats

    def generate(
        self, requests: Sequence[SampleRequest], chunk_sizes: Sequence[int]
    ) -> tuple[list[SampleInfo], list[RolloutChunk]]:
        """Generates one response per request; what a request gets does not depend on the others.

        Args:
            chunk_sizes: samples per chunk; they sum to the number of requests.

        Returns:
            What the driver knows of each sample, in the order of the requests, its chunk index counting these chunks
            from 0; and the chunks.

        Raises:
            RuntimeError: the engine has no weights.
            ValueError: a prompt is empty, too long or has unknown ids; the chunk sizes do not fit.
        """
        version = self._usable_version()
        if sum(chunk_sizes) != len(requests):
            raise ValueError(f"chunk_sizes are {list(chunk_sizes)}; they must sum to the {len(requests)} requests")
        for request in requests:
            prompt = request.prompt
            self._check_tokens(f"prompt {prompt.prompt_id!r}", prompt.token_ids, self._rollout.max_new_tokens)
        work = [
            (request.prompt.token_ids, generation_params(self._rollout, request.seed, self._stop_token_ids))
            for request in requests
        ]
        outputs = self._run(work)
        responses = [
            self._response(request, output, version) for request, output in zip(requests, outputs, strict=True)
        ]
        return into_chunks(responses, chunk_sizes)

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> Ragged:
        """Raw teacher-forced log-probabilities: untouched by temperature, top-p, top-k and the prefix cache.

        They are over the ids below vocab_size: the others have no probability.

        Args:
            token_ids: sequences of T ids each, at most max_model_len.

        Returns:
            A row of T - 1 float32 nats per sequence: of its second token to its last.

        Raises:
            RuntimeError: the engine has no weights.
            ValueError: a sequence is empty, too long or has unknown ids.
        """
        self._usable_version()
        for index, ids in enumerate(token_ids):
            self._check_tokens(f"sequence {index}", ids, 0)
        outputs = self._run([(ids, scoring_params()) for ids in token_ids])
        return Ragged.from_rows((_flat(output.prompt_logprobs) for output in outputs), np.float32)

    def close(self) -> None:
        """Ends the worker processes, and removes what the engine shared and left; it cannot be used again."""
        if self._llm is not None:
            self._llm.engine_core.shutdown()
            self._llm.renderer.shutdown()
            self._llm = self._version = None
            gc.collect()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _commit(self, version: int) -> None:
        """The weights of every rank are those of the version; nothing computed with others is left."""
        assert self._llm is not None
        if not self._llm.reset_prefix_cache():
            self._poisoned = True
            raise RuntimeError(f"engine {self._engine_id}: the prefix cache is in use and could not be reset")
        self._version, self._poisoned = version, False

    def _usable_version(self) -> int:
        """The version to generate with."""
        if self._poisoned:
            raise RuntimeError(f"engine {self._engine_id}: a weight sync failed half-way; sync again before using it")
        if self._version is None:
            raise RuntimeError(f"engine {self._engine_id} has no weights yet: sync it once before using it")
        return self._version

    def _check_tokens(self, what: str, ids: Sequence[int], new_tokens: int) -> None:
        limit = self._rollout.max_model_len
        if not ids:
            raise ValueError(f"{what} is empty; it needs at least one token")
        if len(ids) + new_tokens > limit:
            more = f" and max_new_tokens is {new_tokens}" if new_tokens else ""
            raise ValueError(
                f"{what} has {len(ids)} tokens{more}: together at most max_model_len = {limit}; "
                "shorten it or raise rollout.max_model_len"
            )
        if min(ids) < 0 or max(ids) >= self._spec.dims.vocab:
            raise ValueError(f"{what} has ids from {min(ids)} to {max(ids)}; the model has {self._spec.dims.vocab}")

    def _run(self, work: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[RequestOutput]:
        """Steps the engine until every request is finished; the outputs in the order of the requests."""
        assert self._llm is not None
        for index, (ids, params) in enumerate(work):
            self._llm.add_request(str(index), {"type": "token", "prompt_token_ids": list(ids)}, params)
        finished: dict[int, RequestOutput] = {}
        while self._llm.has_unfinished_requests():
            for output in self._llm.step():
                if output.finished:
                    finished[int(output.request_id)] = cast("RequestOutput", output)
        return [finished[index] for index in range(len(work))]

    def _response(self, request: SampleRequest, output: RequestOutput, version: int) -> Response:
        completion = output.outputs[0]
        length = len(completion.token_ids)
        return Response(
            request=request,
            token_ids=completion.token_ids,
            logprobs=_flat(completion.logprobs),
            finished=completion.finish_reason == "stop",
            versions=(VersionSpan(start=0, stop=length, version=version, engine_id=self._engine_id),),
        )

    def _on_workers(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every rank's WorkerWeights; the results by rank."""
        return self._values(method, self._outcomes(method, *args))

    def _outcomes(self, method: str, *args: Any) -> list[Outcome]:
        if self._llm is None:
            raise RuntimeError(f"engine {self._engine_id} is not running: start it first")
        return self._llm.collective_rpc("megarl_call", args=(method, args))

    def _values(self, method: str, outcomes: Sequence[Outcome]) -> list[Any]:
        """What the ranks returned.

        Raises:
            RuntimeError: ranks failed; it has their tracebacks.
        """
        failed = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
        if failed:
            raise RuntimeError(f"engine {self._engine_id}: {method} failed on\n" + "\n".join(failed))
        return [outcome.value for outcome in outcomes]


def _flat(logprobs: Any) -> list[float]:
    """The values of vLLM's FlatLogprobs; a prompt's first token has none."""
    return logprobs.logprobs
