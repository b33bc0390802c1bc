"""Whether trainer and engines compute the same: both score random sequences, teacher-forced, before a run trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from megarl.cluster.engines import RolloutGroup
from megarl.cluster.trainers import Role, merged
from megarl.config import PPOConfig, RAFTConfig
from megarl.config.schema import LogprobGate
from megarl.data.batches import text_batch
from megarl.data.demonstrations import Demonstration
from megarl.data.schedule import inference_schedule
from megarl.errors import RunError
from megarl.models import model_spec
from megarl.preflight.models import vocab_size
from megarl.types import Ragged

TOLERANCES: Final[Mapping[str, float]] = {"float32": 1e-4, "bfloat16": 0.05}
"""By the model's dtype, the largest mean absolute difference that rounding explains, nats per token."""


_ADVICE = (
    "Large from the first token on: look at what arrives where (the architecture's shard maps, resharding.verify).",
    "Large on later tokens alone: look at attention and positions (rope_theta, rope_scaling, sliding_window).",
    "Just above what is allowed: look at the dtypes of both sides, or raise resharding.gate.max_mean_abs_diff.",
)


class DisagreementError(RunError):
    """Trainer and engines give other probabilities to the same tokens: the rollouts are not the policy's."""


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """How far trainer and engines are apart.

    Args:
        mean_abs_diff, max_abs_diff: of the raw log-probabilities, nats per token, over all tokens of the probe and all
            engines.
    """

    mean_abs_diff: float
    max_abs_diff: float

    def metrics(self) -> dict[str, float]:
        """``sync/logprob_*_abs_diff``."""
        return {"sync/logprob_mean_abs_diff": self.mean_abs_diff, "sync/logprob_max_abs_diff": self.max_abs_diff}


@dataclass(frozen=True, kw_only=True)
class ScoredProbe:
    """Random sequences, and what the trainer says of them.

    Args:
        sequences: token ids.
        logprobs: a row of T - 1 float32 nats per sequence of T ids, raw: of its second token to its last.
        limit: of an engine's mean absolute difference, nats per token.
    """

    sequences: Sequence[npt.NDArray[np.int32]]
    logprobs: Ragged
    limit: float


def scored_probe(config: PPOConfig | RAFTConfig, actor: Role) -> ScoredProbe:
    """Has the actor score random sequences; waits for it.

    Args:
        config: of the run, with a gate.
        actor: with the weights that the engines get.
    """
    gate = config.resharding.gate
    assert gate is not None
    spec = model_spec(config.model.hf_config())
    longest = min(gate.tokens, config.rollout.max_model_len)
    sequences = probe(gate, vocab=vocab_size(config, spec), longest=longest, seed=config.run.seed)
    rows = [Demonstration(key=str(i), prompt_ids=ids[:1], response_ids=ids[1:]) for i, ids in enumerate(sequences)]
    samples, chunks = text_batch(rows, actor.layout.dp)
    budget = config.role("actor").tokens_per_micro_batch
    scoring = actor.probe(inference_schedule(samples, actor.layout, budget), chunks)
    by_chunk: dict[int, Ragged] = merged(scoring)
    logprobs = Ragged.from_rows((by_chunk[sample.chunk][sample.row] for sample in samples), np.float32)
    limit = gate.max_mean_abs_diff or TOLERANCES[spec.dtype]
    return ScoredProbe(sequences=sequences, logprobs=logprobs, limit=limit)


def check_agreement(scored: ScoredProbe, engines: RolloutGroup) -> GateReport:
    """Has every engine score the probe too, and compares.

    Args:
        scored: by the actor whose weights the engines have.
        engines: awake.

    Raises:
        DisagreementError: an engine's mean absolute difference is above the limit, or not a number.
    """
    found = engines.logprobs([ids.tolist() for ids in scored.sequences])
    return compare(scored.logprobs, found, scored.limit)


def probe(gate: LogprobGate, *, vocab: int, longest: int, seed: int) -> list[npt.NDArray[np.int32]]:
    """Random sequences of 2 to ``longest`` ids, the first of them as long as that."""
    generator = np.random.default_rng(seed)
    lengths = [longest, *generator.integers(2, longest, size=gate.sequences - 1, endpoint=True)]
    return [generator.integers(vocab, size=length, dtype=np.int32) for length in lengths]


def compare(trainer: Ragged, engines: Sequence[Ragged], limit: float) -> GateReport:
    """Compares every engine with the trainer.

    Args:
        trainer, engines: rows of nats, the same tokens in all.
        limit: of an engine's mean absolute difference, nats per token.

    Raises:
        DisagreementError: see ``check_agreement``.
    """
    diffs = [np.abs(engine.values.astype(np.float64) - trainer.values) for engine in engines]
    failing = [index for index, diff in enumerate(diffs) if not diff.mean() <= limit]
    if failing:
        raise DisagreementError(_message(trainer, engines, diffs, failing, limit))
    return GateReport(mean_abs_diff=float(np.mean(diffs)), max_abs_diff=float(np.max(diffs)))


def _message(
    trainer: Ragged,
    engines: Sequence[Ragged],
    diffs: Sequence[npt.NDArray[np.float64]],
    failing: Sequence[int],
    limit: float,
) -> str:
    lines = ["Trainer and engines give the same tokens other log-probabilities, with the same weights."]
    for index in failing:
        diff = diffs[index]
        worst, first = int(np.argmax(diff)), np.zeros(len(diff), bool)
        first[trainer.offsets[:-1]] = True
        lines.append(
            f"Engine {index}: mean absolute difference {diff.mean():.3g} nats per token, allowed are {limit:.3g} "
            f"(resharding.gate.max_mean_abs_diff); maximum {diff[worst]:.3g}, where the trainer says "
            f"{trainer.values[worst]:.4f} and the engine {engines[index].values[worst]:.4f}. The first token of each "
            f"sequence alone: {diff[first].mean():.3g}."
        )
    return "\n".join([*lines, *_ADVICE])
