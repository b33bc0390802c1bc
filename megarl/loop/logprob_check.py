"""Compares log-probabilities of trainer and engines on random sequences, before training starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import numpy as np

from megarl.cluster.calls import gather_by_chunk
from megarl.cluster.ray_worker import ChunkRefs
from megarl.config import RolloutTrainingConfig
from megarl.config.schema import LogprobAgreement
from megarl.data.batches import text_batch
from megarl.data.encoding import Ids
from megarl.data.schedule import inference_schedule
from megarl.data.training_texts import TrainingText
from megarl.errors import RunError
from megarl.groups.engines import RolloutGroup
from megarl.groups.trainers import RemoteRole
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ForwardRequest
from megarl.models import model_spec
from megarl.rollout.engine import RolloutEngine
from megarl.types import Ragged, TextChunk

TOLERANCES: Final[Mapping[str, float]] = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest mean absolute difference due to rounding, in nats per token, by the model's dtype."""

_ADVICE = (
    "Check the transfer (shard maps of the architecture, resharding.verify), attention and positions (rope_theta, "
    "rope_scaling, sliding_window) and the dtypes of both sides, or raise resharding.logprob_check.max_mean_abs_diff."
)


Comparison = Callable[[RolloutGroup], Awaitable[dict[str, float]]]
"""Compares all engines, which have the actor's weights; returns the metrics `sync/logprob_*`."""


class DisagreementError(RunError):
    """Trainer and engines disagree on log-probabilities: rollouts are not samples of the policy."""


async def begin_check(config: RolloutTrainingConfig, agreement: LogprobAgreement, actor: RemoteRole) -> Comparison:
    """Computes the actor's log-probabilities of random sequences; returns what compares the engines with them."""
    spec = model_spec(config.model.hf_config())
    longest = min(agreement.tokens, config.rollout.max_model_len)
    vocab = spec.ids_in_use(config.model.vocab_size)
    sequences = random_sequences(agreement, vocab=vocab, longest=longest, seed=config.run.seed)
    texts: list[TrainingText] = []
    for index, ids in enumerate(sequences):
        texts.append(TrainingText(key=str(index), prompt_ids=ids[:1], responses=(ids[1:],)))
    samples, chunks = text_batch(texts, actor.layout.dp)
    schedule = inference_schedule(samples, actor.layout, config.role("actor").tokens_per_micro_batch)
    request = ForwardRequest(schedule=schedule, chunks=ChunkRefs[TextChunk].put(chunks))
    by_chunk = await gather_by_chunk(actor.dispatch(MegatronWorker.logprobs, request))
    logprobs = Ragged.from_rows((by_chunk[sample.chunk][sample.row] for sample in samples), np.float32)

    async def compare(engines: RolloutGroup) -> dict[str, float]:
        found = await engines.call(RolloutEngine.logprobs, [ids.tolist() for ids in sequences])
        return compare_logprobs(logprobs, found, agreement.max_mean_abs_diff or TOLERANCES[spec.dtype])

    return compare


def random_sequences(agreement: LogprobAgreement, *, vocab: int, longest: int, seed: int) -> list[Ids]:
    """Returns sequences of 2 to `longest` token ids; the first has `longest`."""
    generator = np.random.default_rng(seed)
    lengths = [longest, *generator.integers(2, longest, size=agreement.sequences - 1, endpoint=True)]
    return [generator.integers(vocab, size=length, dtype=np.int32) for length in lengths]


def compare_logprobs(trainer: Ragged, engines: Sequence[Ragged], limit: float) -> dict[str, float]:
    """Returns the mean and the largest absolute difference over all tokens and engines, as metrics.

    Args:
        trainer, engines: raw log-probabilities in nats, T - 1 for a sequence of T ids: from its
            second token on.
        limit: largest mean absolute difference of an engine, in nats per token; above it, raises
            DisagreementError.
    """
    diffs = [np.abs(engine.values.astype(np.float64) - trainer.values) for engine in engines]
    lines = ["The trainer and the engines disagree on log-probabilities, with the same weights."]
    for index, diff in enumerate(diffs):
        if diff.mean() <= limit:
            continue
        worst = int(np.argmax(diff))
        lines.append(
            f"Engine {index}: mean absolute difference {diff.mean():.3g} nats per token, allowed are {limit:.3g}; "
            f"maximum {diff[worst]:.3g}, where the trainer has {trainer.values[worst]:.4f} and the engine "
            f"{engines[index].values[worst]:.4f}."
        )
    if len(lines) > 1:
        raise DisagreementError("\n".join([*lines, _ADVICE]))
    return {"sync/logprob_mean_abs_diff": float(np.mean(diffs)), "sync/logprob_max_abs_diff": float(np.max(diffs))}
