"""Engines that record or replay responses, so that runs can be compared on the same batch."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np

from megarl.config.schema import Rollout
from megarl.rollout.completions import PendingChunk, Response, pack_chunk, version_spans
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.engine_options import EngineOptions
from megarl.rollout.requests import sampling_settings
from megarl.types import RolloutChunk, SampleRequest, WorkItem

if TYPE_CHECKING:
    from vllm import RequestOutput

_LISTS = ("loss_mask", "kept_counts", "kept_ids")
_OPTIONAL = (*_LISTS, "routes")
_EVALUATION = "0"
"""The step in the sample ids of evaluations, which repeat."""


class RecordingEngine(RolloutEngine):
    """Writes every response to `rollout.record`, except those of evaluations."""

    def _response(self, request: SampleRequest, output: RequestOutput, version: int) -> Response:
        response = super()._response(request, output, version)
        assert self._rollout.record is not None
        if _step(request.sample_id) != _EVALUATION:
            directory = Path(self._rollout.record)
            directory.mkdir(parents=True, exist_ok=True)
            write_sample(directory, pack_chunk(0, [response])[1], 0, self._rollout, self._options.kept_max)
        return response


class ReplayingEngine(RolloutEngine):
    """Returns the responses in `rollout.replay` in recorded steps, and generates in others."""

    def __init__(self, model_dir: str, rollout: Rollout, options: EngineOptions, *, engine_id: int) -> None:
        super().__init__(model_dir, rollout, options, engine_id=engine_id)
        assert rollout.replay is not None
        self._directory = Path(rollout.replay)
        self._steps = recorded_steps(self._directory)

    def _generate(self, item: WorkItem) -> PendingChunk:
        if _step(item.requests[0].sample_id) not in self._steps:
            return super()._generate(item)
        self._state.usable_version()
        pending = PendingChunk(item)
        for row, request in enumerate(item.requests):
            pending.add(row, read_response(self._directory, request, self._rollout, self._options.kept_max))
        return pending


def recorded_steps(directory: Path) -> set[str]:
    return {_step(unquote(file.stem)) for file in directory.glob("*.npz")} - {_EVALUATION}


def write_sample(directory: Path, chunk: RolloutChunk, row: int, rollout: Rollout, kept_max: int | None = None) -> None:
    """Writes a sample to a file named by its id, so that it can be read with any division into chunks."""
    columns: dict[str, Any] = {
        "prompt_ids": chunk.prompt_ids[row],
        "response_ids": chunk.response_ids[row],
        "rollout_logprobs": chunk.rollout_logprobs[row],
        "finished": chunk.finished[row],
        "versions": np.array([astuple(span) for span in chunk.versions[row]]),
        "sampling": sampling_settings(rollout, kept_max),
    }
    for name in _OPTIONAL:
        column = getattr(chunk, name)
        if column is not None:
            columns[name] = column[row]
    np.savez(_file(directory, chunk.sample_ids[row]), **columns)


def read_response(directory: Path, request: SampleRequest, rollout: Rollout, kept_max: int | None = None) -> Response:
    """Returns the recorded response to a request; raises ValueError if it is missing, or answers another one.

    Args:
        kept_max: most ids, from which a token was sampled, that are recorded; None where none are.
    """
    path = _file(directory, request.sample_id)
    advice = "record and replay with the same run.seed, data and steps, and with a curriculum the same scores"
    if not path.exists():
        raise ValueError(f"rollout.replay: {directory} has no sample {request.sample_id!r}: {advice}")
    with np.load(path) as stored:
        if tuple(stored["prompt_ids"]) != request.prompt.token_ids:
            other = f"another prompt than {request.prompt.prompt_id!r}"
            raise ValueError(f"rollout.replay: {path} answers {other}: {advice}")
        if not np.array_equal(stored.get("sampling", ()), sampling_settings(rollout, kept_max)):
            raise ValueError(
                f"rollout.replay: {path} has log-probabilities of another distribution than this run's: record and "
                "replay with the same stage, policy loss, rollout.temperature, top_p, top_k, min_p, kept_max and "
                "min_new_tokens"
            )
        return Response(
            request=request,
            token_ids=stored["response_ids"].tolist(),
            logprobs=stored["rollout_logprobs"].tolist(),
            finished=bool(stored["finished"]),
            versions=version_spans(stored["versions"].tolist()),
            routes=stored.get("routes"),
            **{name: stored[name].tolist() for name in _LISTS if name in stored},
        )


def _step(sample_id: str) -> str:
    """The first part of the ids from `sample_requests`."""
    return sample_id.partition("/")[0]


def _file(directory: Path, sample_id: str) -> Path:
    return directory / f"{quote(sample_id, safe='')}.npz"
