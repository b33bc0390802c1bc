"""Training of a policy on preferences.

Where the loss reads them, the log-probabilities of a step's responses under the reference, which is
the initial model, are computed before the update and travel in its chunks; or they are computed
before the first step, by the actor. So is the divergence of the policy from the reference, of each
prompt with the response to another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megarl.cluster.calls import gather_by_chunk
from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.config import ConfigError, Problem
from megarl.data.batches import text_batch
from megarl.data.encoding import Ids
from megarl.data.schedule import inference_schedule
from megarl.data.training_texts import TrainingText
from megarl.groups.trainers import RemoteRole
from megarl.loop.pass_meter import PassMeter
from megarl.loop.supervised import SupervisedTrainer
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ForwardRequest
from megarl.preflight.datasets import Sets
from megarl.run.frozen_weights import digest_model
from megarl.run.paths import RunPaths
from megarl.run.sinks import Metrics
from megarl.stages.dpo.config import DPOConfig
from megarl.stages.dpo.reference_logprobs import ReferenceLogprobs
from megarl.texts import counted
from megarl.types import SampleInfo, TextChunk

_STEPS_PER_FILE = 32
"""Steps whose log-probabilities are computed and kept at a time, before the first step."""


class DPOTrainer(SupervisedTrainer):
    """Trains the actor on pairs of responses."""

    def __init__(
        self, config: DPOConfig, session: Session, model_dir: str, data: Sets, phase: Callable[[str], None]
    ) -> None:
        super().__init__(config, session, model_dir, data, phase, evaluate_every=config.data.evaluate_every)
        self._reference = self.roles.get("reference")
        self._reads_kl = "kl" in config.preference.reads
        self._max_tokens = config.data.max_tokens
        self._rows_of_sets = list(data.rows.values())
        self._precomputed: ReferenceLogprobs | None = None
        if config.reference.precompute:
            directory = RunPaths(config.run.dir).reference / digest_model(Path(model_dir))
            self._precomputed = ReferenceLogprobs(directory)

    async def begin(self, step: int) -> Metrics:
        """Computes the log-probabilities of all rows with the actor, which is the initial model."""
        precomputed = self._precomputed
        if precomputed is None:
            return {}
        missing = precomputed.missing(itertools.chain(*self._rows_of_sets))
        if missing and step > 0:
            rows = counted(len(missing), "row")
            rule = f"the log-probabilities of {rows} under the initial model are not in run.dir, "
            rule += "and the actor has other weights now"
            fix = "restore its folder reference and the rows that the run began with, or choose another run.dir"
            raise ConfigError([Problem("reference.precompute", "true", rule, fix)])
        count = _STEPS_PER_FILE * self._config.rows_per_step
        for first in range(0, len(missing), count):
            self._phase(f"reference log-probabilities, {first} of {counted(len(missing), 'row')}")
            samples, chunks = text_batch(missing[first : first + count], self._layout.dp)
            texts = ChunkRefs[TextChunk].put(chunks)
            precomputed.add(chunks, await self._logprobs(self._role, samples, texts, None, adapted=False))
        return {}

    async def chunks_of(
        self, samples: Sequence[SampleInfo], chunks: Sequence[TextChunk], meter: PassMeter | None
    ) -> ChunkRefs[TextChunk]:
        """Adds the log-probabilities under the reference, and the divergence from it."""
        if self._precomputed is not None:
            kept = [replace(chunk, ref_logprobs=self._precomputed.column(chunk)) for chunk in chunks]
            return ChunkRefs[TextChunk].put(kept)
        reference = self._reference
        if reference is None:
            return await super().chunks_of(samples, chunks, meter)
        texts = ChunkRefs[TextChunk].put(chunks)
        under_reference = await self._logprobs(reference, samples, texts, meter)
        kl: float | None = None
        if self._reads_kl:
            others, mismatched = text_batch(mismatched_texts(chunks, self._max_tokens), len(chunks))
            texts = ChunkRefs[TextChunk].put(mismatched)
            theirs = await self._logprobs(reference, others, texts, meter)
            ours = await self._logprobs(self._role, others, texts, meter)
            kl = max(0.0, float((np.concatenate(ours) - np.concatenate(theirs)).mean()))
        scored: list[TextChunk] = []
        for chunk, whole in zip(chunks, under_reference, strict=True):
            scored.append(replace(chunk, ref_logprobs=whole.astype(np.float32), kl=kl))
        return ChunkRefs[TextChunk].put(scored)

    async def _logprobs(
        self,
        role: RemoteRole,
        samples: Sequence[SampleInfo],
        texts: ChunkRefs[TextChunk],
        meter: PassMeter | None,
        *,
        adapted: bool = True,
    ) -> list[np.typing.NDArray[np.float64]]:
        """Returns the log-probabilities of whole responses under a role, [N] for each chunk."""
        budget = self._config.role(role.name).tokens_per_micro_batch
        schedule = inference_schedule(samples, role.layout, budget)
        call = role.dispatch(MegatronWorker.logprobs, ForwardRequest(schedule=schedule, chunks=texts, adapted=adapted))
        columns = await gather_by_chunk(call)
        if meter is not None:
            meter.add(role.name, role.name, samples, await call.longest())
        whole: list[np.typing.NDArray[np.float64]] = []
        for index in sorted(columns):
            whole.append(np.array([row.sum(dtype=np.float64) for row in columns[index]]))
        return whole


def mismatched_texts(chunks: Sequence[TextChunk], max_tokens: int) -> list[TrainingText]:
    """Returns each prompt of a step with the next response to another one, cut to ``max_tokens``.

    Where all prompts are the same, it is the next response.
    """
    prompts: list[Ids] = []
    responses: list[Ids] = []
    for chunk in chunks:
        prompts += list(chunk.prompt_ids)
        responses += list(chunk.response_ids)
    texts: list[TrainingText] = []
    for index, prompt in enumerate(prompts):
        chosen = (index + 1) % len(prompts)
        while np.array_equal(prompts[chosen], prompt) and chosen != index:
            chosen = (chosen + 1) % len(prompts)
        if chosen == index:
            chosen = (index + 1) % len(prompts)
        response = responses[chosen][: max(1, max_tokens - len(prompt))]
        texts.append(TrainingText(key=str(index), prompt_ids=prompt, responses=(response,)))
    return texts
