"""A vLLM engine that generates rollouts and receives its weights from the trainer, shard by shard."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from megarl.garbage_collection import collections_skipped
from megarl.models import model_spec
from megarl.models.lora import engine_maps
from megarl.remote import remote
from megarl.rollout.adapter_buffers import adapter_request, adapter_settings
from megarl.rollout.completions import (
    PendingChunk,
    PickRequest,
    Response,
    ResponseEnds,
    TruncateRequest,
    response_ends,
    select_rows,
    truncate_responses,
    version_spans,
)
from megarl.rollout.drafts import DraftCounts, draft_counts, draft_settings
from megarl.rollout.engine_memory import BLOCK_TOKENS, cache_bytes, most_sequences
from megarl.rollout.engine_options import EngineOptions
from megarl.rollout.engine_state import EngineState
from megarl.rollout.kept_sets import kept_sets, with_sampling_mask
from megarl.rollout.requests import Requests, Turns, generation_params, scoring_params, stop_token_ids
from megarl.rollout.routes import how_to_do_without_routes, response_routes
from megarl.rollout.vllm_environment import (
    DECODER_FORMAT,
    importing_vllm,
    scratch_directory,
    set_vllm_environment,
    temporary_files_in,
)
from megarl.types import Pickled, Ragged, RolloutChunk, SampleInfo, SampleRequest, TurnAnswer, WorkItem
from megarl.weights.hf_files import read_config
from megarl.weights.shard_map import ShardMap

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput, SamplingParams

    from megarl.config.schema import Rollout as RolloutConfig
    from megarl.resharding import ConnectRequest, SyncStats
    from megarl.rollout.weight_receiver import CallOutcome

_START_MEMORY = 0.01
"""Part of the device's memory that vLLM (0.32) requires to be free, even with a given cache size; its default
does not allow a trainer on the device."""


class RolloutEngine:
    """A vLLM engine in this process; more than one tensor-parallel rank are worker processes.

    The owner calls `step` as long as responses are in progress, and other methods between two
    steps. The weights' version is that of the last committed sync, or 0 if they are loaded from
    files. `EngineState` refuses calls in the wrong state. vLLM takes over the process (default
    process group, random state, threads), so nothing else in it may use torch.

    Args:
        model_dir: Hugging Face directory; config.json is enough when the weights come by sync.
    """

    def __init__(
        self,
        model_dir: str | Path,
        rollout: RolloutConfig,
        options: EngineOptions,
        *,
        engine_id: int,
    ) -> None:
        self._model_dir = str(model_dir)
        self._rollout = rollout
        self._options = options
        self._engine_id = engine_id
        self._inflight = rollout.mode == "inflight"
        self._state = EngineState(
            engine_id,
            sleeps=rollout.sleep,
            drops=options.drops_weights,
            version=0 if options.weights == "files" else None,
            overlaps=self._inflight,
        )
        self._spec = model_spec(read_config(model_dir))
        ends = set(rollout.stop_token_ids)
        if not rollout.ignore_eos:
            ends.update(stop_token_ids(model_dir))
        self._stop_token_ids = tuple(ends)
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._llm: LLMEngine | None = None
        self._requests: Requests | None = None
        self._pending: set[PendingChunk] = set()
        self._drafts = DraftCounts()
        self._turns = Turns(lambda item: self._generate(item).chunk)
        vocab = self._spec.dims.vocab
        last = max(ends, default=0)
        if last >= vocab:
            raise ValueError(f"stop token {last} is not one of the model's {vocab} ids: remove it")
        if rollout.stop and options.tokenizer is None:
            texts = list(rollout.stop)
            raise ValueError(f"rollout.stop is {texts}; reading texts needs a tokenizer: name one")

    @property
    def version(self) -> int | None:
        return self._state.version

    @remote(phase="start")
    def start(self) -> int:
        """Starts vLLM and checks its parameters against the shard maps; with `rollout.sleep` the engine then sleeps.

        Returns the number of responses that vLLM generates at once.
        """
        options = self._options
        self._scratch = scratch_directory()
        set_vllm_environment(options.device, self._scratch.name, options.threads)
        with importing_vllm(options.device):
            from vllm import EngineArgs, LLMEngine
            from vllm.usage.usage_lib import UsageContext

            from megarl.rollout.weight_receiver import WorkerExtension

        cpu = options.device == "cpu"
        tp = self._rollout.tp
        cache = cache_bytes(self._spec, self._rollout, options.device, options.device_memory, options.besides_cache)
        arguments = EngineArgs(
            model=self._model_dir,
            tokenizer=options.tokenizer,
            skip_tokenizer_init=not self._rollout.stop,
            dtype=cast(Any, self._spec.dtype),  # vLLM's "auto" serves float32 models in half precision
            quantization=self._rollout.quantization,
            tensor_parallel_size=tp,
            distributed_executor_backend="uni" if tp == 1 else "mp",
            worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
            enforce_eager=cpu or self._rollout.enforce_eager,
            async_scheduling=False if self._inflight else None,  # no batch is under way when the weights change
            enable_chunked_prefill=False if cpu else None,  # vLLM (0.32) cannot step a CPU's seeded generator back
            enable_sleep_mode=self._rollout.sleep and not cpu,  # on a CPU vLLM sleeps without it, and frees nothing
            max_model_len=self._rollout.positions,
            block_size=BLOCK_TOKENS,
            kv_cache_memory_bytes=cache,
            gpu_memory_utilization=_START_MEMORY,
            max_num_seqs=most_sequences(self._spec, self._rollout, options.device, cache),
            enable_prefix_caching=self._spec.dims.delta is None,  # states are not kept by prefix
            mamba_ssm_cache_dtype="float32",  # states as the trainers have them
            logprobs_mode="processed_logprobs",
            max_logprobs=self._recorded_logprobs,
            return_sampling_mask=self._has_masks,
            enable_return_routed_experts=options.records_routes and not cpu,
            generation_config="vllm",
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **self._load_settings(),
        )
        # Its worker and the model's modules are imported.
        with importing_vllm(options.device), temporary_files_in(self._scratch.name), how_to_do_without_routes():
            self._llm = LLMEngine.from_engine_args(arguments, UsageContext.LLM_CLASS)  # allows the largest batches
        self._requests = Requests(self._llm, adapter_request() if options.adapters else None)
        self._call("prepare", self.shard_maps(), options.vocab_size)
        if options.records_routes and cpu:
            self._call("record_routes", self._spec.table.mixtures, self._spec.dims.experts)
        if self._inflight:
            self._llm.set_weight_version(str(self.version))
        if self._rollout.sleep:
            self._suspend()
        return self._llm.vllm_config.scheduler_config.max_num_seqs

    def _load_settings(self) -> dict[str, Any]:
        """Returns how vLLM gets weights and drafts, and what it must not use."""
        loads = self._options.weights == "files"
        family = self._spec.family
        settings: dict[str, Any] = {"load_format": "auto" if loads else "dummy"}
        if loads and self._spec.untrained:
            settings["load_format"] = DECODER_FORMAT
        overrides: dict[str, Any] = {}
        if family.engine_class is not None:
            overrides["architectures"] = [family.engine_class]
        if family.latent:
            overrides["moe_router_dtype"] = "float32"  # of logits, as in transformers
        settings["hf_overrides"] = overrides
        if family.latent and self._options.device == "cpu":
            # Its kernel rotates neighbors wrongly in queries [positions, heads, width] (vLLM 0.32: csrc/cpu).
            settings["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
            # For CPUs with AMX it prefers AMX_MLA (platforms/cpu.py), which takes bfloat16 alone.
            settings["attention_backend"] = "CPU_MLA"
        if self._options.adapters is not None:
            settings |= adapter_settings(self._options.adapters, self.shard_maps()[0])
        return settings | draft_settings(self._rollout, self._options.device, loads=loads)

    def shard_maps(self) -> list[ShardMap]:
        """Returns the shard map of each tensor-parallel rank, in vLLM's names."""
        return engine_maps(self._spec, self._rollout.tp, self._options.adapters)

    @remote(phase="start")
    def connect(self, request: ConnectRequest) -> None:
        """Connects every rank to the trainer's, and waits for all ranks of the sync. Ends an earlier connection."""
        version = -1 if self.version is None else self.version
        self._call("connect", request.sync, tuple(request.ranks), version)

    @remote(phase="sync")
    def receive_weights(self, version: int) -> list[SyncStats]:
        """Receives the weights of a version, not below the previous one; every rank writes its shard as it arrives.

        If it fails before anything is written, the engine keeps its weights; else responses in
        progress wait until a sync succeeds, and others are refused. An aborted sync raises
        SyncError. Returns each rank's statistics, with the stage `reset` of the prefix cache.

        In mode `inflight` responses in progress continue with the new weights: their tokens so far
        are prefilled again, or with `rollout.inflight_cache` `keep` their cache stays as it is.
        docs/async.md says what that changes.
        """
        self._state.begin_sync(len(self._running_requests))
        received: list[SyncStats] = self._call("receive", version)
        start = perf_counter()
        self._commit(version)
        reset = perf_counter() - start
        for stats in received:
            stats.seconds["reset"] = reset
        return received

    @remote(phase="rollout")
    def sleep(self) -> None:
        """Frees receive buffers, weights and KV cache; on a CPU vLLM keeps weights and cache."""
        self._state.sleep(len(self._running_requests))
        self._call("release")
        self._suspend()

    @remote(phase="sync")
    def wake_weights(self) -> None:
        """Allocates the weights again, for a sync to fill; those from files are restored."""
        self._state.wake_weights()
        self._running.wake_up(["weights"])

    @remote(phase="sync")
    def wake_cache(self) -> None:
        """Allocates the KV cache again; the engine can be used."""
        self._state.wake_cache()
        self._running.wake_up(["kv_cache"])

    @remote(phase="rollout")
    def generate(self, item: WorkItem) -> Future[tuple[dict[int, RolloutChunk], list[SampleInfo]]]:
        """Starts one response per request; the chunk comes when all its responses are finished.

        A response does not depend on the other requests. Raises ValueError if a prompt is empty,
        too long or has unknown ids.
        """
        return self._generate(item).chunk

    @remote(phase="rollout")
    def sample_turns(self, requests: Sequence[tuple[int, Pickled[SampleRequest]]]) -> None:
        """Starts turns of conversations, each with a number; raises ValueError as `generate` does."""
        self._turns.start(requests)

    @remote(phase="rollout")
    def sampled_turns(self) -> Future[list[TurnAnswer]]:
        """Returns the turns that are finished, as soon as there are any; none for a heartbeat."""
        return self._turns.next()

    @remote(phase="rollout")
    def take_drafts(self) -> DraftCounts:
        """Returns the counts of the responses that have ended since the last call; works asleep."""
        counts = self._drafts
        self._drafts = DraftCounts()
        return counts

    def _generate(self, item: WorkItem) -> PendingChunk:
        version = self._state.usable_version()
        for request in item.requests:
            prompt = request.prompt
            new_tokens = request.max_new_tokens or self._rollout.max_new_tokens
            self._check_tokens(f"prompt {prompt.prompt_id!r}", prompt.token_ids, new_tokens)
        pending = PendingChunk(item)
        self._pending.add(pending)
        pending.chunk.add_done_callback(lambda _: self._pending.discard(pending))
        for row, request in enumerate(item.requests):
            params = self._params(request)
            done = partial(self._finish, pending, row, version)
            self._running_requests.add(request.prompt.token_ids, params, str(version), done)
        return pending

    @property
    def _recorded_logprobs(self) -> int:
        """The number of likeliest tokens whose log-probabilities tell which tokens were kept, and whether too many."""
        kept_max = self._options.kept_max
        if kept_max is None or self._has_masks:
            return 0
        return min(kept_max + 1, self._spec.dims.vocab)

    def _params(self, request: SampleRequest) -> SamplingParams:
        params = generation_params(self._rollout, request, self._stop_token_ids, logprobs=self._recorded_logprobs)
        if self._has_masks:
            return with_sampling_mask(params, self._spec.dims.vocab)
        return params

    @property
    def _has_masks(self) -> bool:
        """Whether vLLM returns the ids from which a token was sampled."""
        return self._options.kept_max is not None and self._options.device != "cpu"

    def _finish(self, pending: PendingChunk, row: int, version: int, output: RequestOutput) -> None:
        pending.add(row, self._response(pending.item.requests[row], output, version))

    def step(self) -> bool:
        """Runs a step of vLLM; returns whether there is more to do. A failure fails all responses in progress.

        With weights of several versions there is nothing to do before the next sync.
        """
        if self._requests and not self._state.mixed:
            try:
                self._requests.step()
            except Exception as error:
                self._requests.abort()
                for pending in list(self._pending):
                    pending.chunk.set_exception(error)
        self._turns.step()
        return bool(self._requests) and not self._state.mixed

    @remote(phase="rollout")
    def pick(self, request: PickRequest) -> dict[int, RolloutChunk]:
        """Returns chunks of rows of other chunks; works asleep."""
        return {new: select_rows(request.chunks, rows) for new, rows in request.rows.items()}

    @remote(phase="rollout")
    def truncate(self, request: TruncateRequest) -> tuple[dict[int, RolloutChunk], dict[int, ResponseEnds]]:
        """Returns truncated chunks and their ends; works asleep."""
        chunks: dict[int, RolloutChunk] = {}
        ends: dict[int, ResponseEnds] = {}
        for index in request.assigned:
            chunk = truncate_responses(request.chunks[index], request.token, request.after)
            chunks[index] = chunk
            ends[index] = response_ends(chunk)
        return chunks, ends

    @remote(phase="inference")
    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> Ragged:
        """Returns teacher-forced log-probabilities of sequences, without temperature, top-p, top-k and prefix cache.

        The distribution is over the ids below vocab_size. A row is T - 1 float32 nats of a sequence
        of T ids, of its second token to its last. Raises ValueError if a sequence is empty, too
        long or has unknown ids.
        """
        version = self._state.usable_version()
        requests = self._running_requests
        for index, ids in enumerate(token_ids):
            self._check_tokens(f"sequence {index}", ids, 0)
        scored: dict[int, list[float]] = {}

        def finish(index: int, output: RequestOutput) -> None:
            scored[index] = _flat(output.prompt_logprobs)

        for index, ids in enumerate(token_ids):
            params = scoring_params()
            if self._has_masks:
                params = with_sampling_mask(params, self._spec.dims.vocab)
            requests.add(ids, params, str(version), partial(finish, index))
        while len(scored) < len(token_ids):
            requests.step()
        return Ragged.from_rows((scored[index] for index in range(len(token_ids))), np.float32)

    @remote(phase="start")
    def close(self) -> None:
        """Ends the worker processes and removes the engine's files; the collector frees the memory of this one."""
        if self._llm is not None:
            with collections_skipped():
                self._llm.engine_core.shutdown()
                self._llm.renderer.shutdown()
            self._llm = None
            self._requests = None
        if self._scratch is not None:
            self._scratch.cleanup()

    @property
    def _running(self) -> LLMEngine:
        if self._llm is None:
            raise RuntimeError(f"engine {self._engine_id} is not running: start it first")
        return self._llm

    @property
    def _running_requests(self) -> Requests:
        if self._requests is None:
            raise RuntimeError(f"engine {self._engine_id} is not running: start it first")
        return self._requests

    def _suspend(self) -> None:
        """Lets vLLM sleep: weights that the next sync brings are dropped, others move to host memory."""
        self._running.sleep(level=2 if self._options.drops_weights else 1)

    def _commit(self, version: int) -> None:
        """Sets the version, and drops the prefix cache of the previous weights unless responses still use it.

        New requests do not find old entries that stay: their salt is the version, also if vLLM has
        not begun them.
        """
        self._state.mix()
        in_progress = len(self._running_requests) > 0
        keeps = in_progress and self._rollout.inflight_cache == "keep"
        if not keeps and not self._running.reset_prefix_cache(reset_running_requests=in_progress):
            raise RuntimeError(f"engine {self._engine_id}: the prefix cache is in use and could not be reset")
        if keeps:
            self._running_requests.restart_without_token(str(version))
        if self._inflight:
            self._running.set_weight_version(str(version))
        self._state.commit(version)

    def _check_tokens(self, what: str, ids: Sequence[int], new_tokens: int) -> None:
        limit = self._rollout.max_model_len
        if not ids:
            raise ValueError(f"{what} is empty; it needs at least one token")
        if len(ids) + new_tokens > limit:
            rule = f"together at most max_model_len = {limit}; shorten it or raise rollout.max_model_len"
            raise ValueError(f"{what} has {len(ids)} tokens and max_new_tokens is {new_tokens}: {rule}")
        vocab = self._spec.dims.vocab
        if min(ids) < 0 or max(ids) >= vocab:
            raise ValueError(f"{what} has ids from {min(ids)} to {max(ids)}; the model has {vocab}")

    def _response(self, request: SampleRequest, output: RequestOutput, version: int) -> Response:
        """Returns a finished response, which began under the weights of `version`."""
        completion = output.outputs[0]
        self._drafts.add(draft_counts(completion))
        spans = [(0, len(completion.token_ids), version, self._engine_id)]
        if self._inflight:
            assert completion.weight_versions is not None
            spans = [(span.start, span.end, int(span.version), self._engine_id) for span in completion.weight_versions]
        values: dict[str, Any] = {"logprobs": _flat(completion.logprobs)}
        kept_max = self._options.kept_max
        if kept_max is not None:
            values = kept_sets(completion, kept_max)
        if self._options.records_routes:
            recorded = None
            if self._options.device == "cpu":
                recorded = self._call("take_routes", output.request_id)[0]
            values["routes"] = response_routes(output, self._spec, recorded)
        return Response(
            request=request,
            token_ids=completion.token_ids,
            finished=completion.finish_reason == "stop",
            versions=version_spans(spans),
            **values,
        )

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every rank's receiver; returns the results by rank.

        Raises RuntimeError with the ranks' tracebacks, or SyncError if all saw the sync aborted.
        """
        from megarl.resharding import SyncError

        workers = self._running
        outcomes: list[CallOutcome] = workers.collective_rpc("megarl_call", args=(method, *args))
        if not all(outcome.consistent for outcome in outcomes):
            self._state.mix()
        errors: list[str] = []
        aborted: list[str] = []
        for rank, outcome in enumerate(outcomes):
            if outcome.error:
                errors.append(f"rank {rank}: {outcome.error}")
                aborted.append(outcome.aborted)
        if errors and all(aborted):
            raise SyncError(aborted[0])
        if errors:
            failures = "\n".join(errors)
            raise RuntimeError(f"engine {self._engine_id}: {method} failed on\n{failures}")
        return [outcome.value for outcome in outcomes]


def _flat(logprobs: Any) -> list[float]:
    """Returns the values of vLLM's FlatLogprobs; the first token of a prompt has none."""
    return logprobs.logprobs
