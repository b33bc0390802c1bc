"""With one optimizer step per step, the forward pass before it is skipped: losses, weights and metrics are the same.

Where the engines' log-probabilities take the place of the old ones, the update measures the actor likewise.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.schema import Algo, Optimizer
from megarl.config.schema.loss_specs import PolicySpec
from megarl.data.schedule import inference_schedule, update_schedules
from megarl.experience.build import build_experience
from megarl.experience.records import StepContext
from megarl.megatron.losses import loss_maker, report
from megarl.megatron.parallel import GroupCache
from megarl.types import Layout, Ragged, VersionSpan
from tests.megatron.compare import everywhere, logprobs_by_chunk, reductions_over, weights_of
from tests.megatron.layouts import restart
from tests.megatron.samples import columns_of, random_chunks
from tests.megatron.test_parity import case_id
from tests.megatron.tiny import load_role, save_model
from tests.pool import RankPool

TEMPERATURE, VERSION, OLDEST = 0.9, 2, 2
SETTINGS = Optimizer(lr=1.0, eps=1.0, weight_decay=0.0, clip_grad=None)
"""With an eps far above every gradient Adam's step is in proportion to it, and so is its error."""
PENALTY = {"in": "loss", "estimator": "k3", "coef": 0.3}
ALGOS: dict[str, dict[str, Any]] = {
    "ppo": {"entropy_coef": 0.01, "kl": PENALTY},
    "dapo": {"policy_loss": {"name": "ppo", "clip_high": 0.28}},
    "gspo": {"policy_loss": "gspo", "aggregation": "sequence_mean"},
    "cispo": {"policy_loss": "cispo", "kl": {**PENALTY, "importance": True}},
    "reinforce": {"policy_loss": "reinforce", "correction": {"sequence_mask": {"delta": 0.01}}},
    "sapo": {"policy_loss": "sapo", "aggregation": "sequence_mean"},
    "gmpo": {"policy_loss": "gmpo", "aggregation": "sequence_mean", "kl": {**PENALTY, "estimator": "full"}},
}
ENGINES = ("rollout", "loglinear", "linear")
"""Choices of old log-probabilities that the engines' take part in."""
DRIFT = ("objective/kl", "objective/kl_per_token", "objective/kl_token_mean", "objective/entropy")
Told = dict[str, float]


def _sampled(count: int, logprobs: Any) -> list[Any]:
    """Chunks that an engine sampled, near these log-probabilities, with weights of several versions."""
    chunks, _ = random_chunks(count)
    random = np.random.default_rng(3)

    def versions(row: int, tokens: int) -> tuple[VersionSpan, ...]:
        cut = min(row, tokens)
        ends = ((0, cut, row % 2), (cut, tokens, VERSION))
        return tuple(
            VersionSpan(start=start, stop=stop, version=version, engine_id=0)
            for start, stop, version in ends
            if start < stop
        )

    return [
        replace(
            chunk,
            rollout_logprobs=Ragged(
                values=(own.values + random.normal(scale=0.1, size=len(own.values))).astype(np.float32),
                offsets=own.offsets,
            ),
            versions=tuple(versions(row, int(n)) for row, n in enumerate(chunk.response_ids.lengths)),
        )
        for chunk, own in zip(chunks, (logprobs[i] for i in range(count)), strict=True)
    ]


def _both(
    rank: int, directory: Path, other: Path, layout: Layout, budget: int, count: int
) -> tuple[dict[str, tuple[Told, Told, float]], dict[str, tuple[Told, Told]]]:
    """By case: what is told without and with the pass, and how far the weights are apart, relative to their move.

    And by choice of ENGINES: what is told with it, and what is to be told of actor and engines.
    """
    cache = GroupCache()
    actor = load_role(directory, "actor", layout, rank, cache, trainable=True)
    reference = load_role(other, "reference", layout, rank, cache)
    actor.start_training(SETTINGS, total_steps=1, decay=0.5)
    start = weights_of(actor)
    chunks, infos = random_chunks(count)
    passes = inference_schedule(infos, layout, budget).ranks[actor.coords.dp]
    old, ref = (everywhere(logprobs_by_chunk(role, passes, chunks, TEMPERATURE)) for role in (actor, reference))
    sampled = _sampled(count, old)
    scores = {i: np.arange(3, dtype=np.float32) for i in range(count)}
    scores[0][1] = math.nan
    outcomes = {i: np.array([-1.0, 0.0, 2.0]) for i in range(count)}
    (schedule,) = update_schedules(infos, layout, budget, mini_batches=1, epochs=1, seed=7, step=2)

    reductions = reductions_over(actor.model.groups.dp)

    def step(fields: dict[str, Any], *, recomputed: bool) -> tuple[Told, dict[str, torch.Tensor]]:
        restart(actor, start)
        algo = Algo.model_validate({"advantage": "grpo", **fields, "mini_batches": 2 if recomputed else 1})
        columns = columns_of(
            scores,
            old=old if recomputed else None,
            ref=ref if algo.kl.coef else None,
            outcomes=outcomes,
            untrained=frozenset({(0, 2)}),
        )
        context = StepContext(kl_coef=0.3, version=VERSION, max_staleness=OLDEST, groups=count)
        built, told = build_experience(passes.chunks, sampled, columns, algo, None, context, *reductions)
        experience = everywhere(built if actor.reports else None)
        known = recomputed or algo.correction.old_logprobs in ENGINES
        assert all((chunk.old_logprobs is not None) == known for chunk in experience.values())
        spec = PolicySpec(
            algo=algo, temperature=TEMPERATURE, share=1.0, mix_share=0.0, max_staleness=OLDEST, value_norm=None
        )
        make_loss = loss_maker(spec, actor, experience, kl_coef=0.3, reference=reference)
        (metrics,) = actor.update([schedule.ranks[actor.coords.dp]], experience, make_loss)
        return {**told.metrics, **report(spec, metrics)}, weights_of(actor)

    found = {}
    for name, fields in ALGOS.items():
        (known, weights), (recomputed, expected) = (step(fields, recomputed=way) for way in (False, True))
        moved = max(float((value - start[key]).abs().max()) for key, value in expected.items())
        apart = max(float((value - expected[key]).abs().max()) for key, value in weights.items())
        found[name] = (known, recomputed, apart / moved)
    penalised = {"kl": {"coef": 0.3}}
    recomputed, _ = step(penalised, recomputed=True)
    rows = [(i, row) for i in range(count) for row in range(3) if not math.isnan(scores[i][row])]
    of_engines = [sampled[i].rollout_logprobs[row].astype(float) for i, row in rows]
    drifts = [own - ref[i][row] for own, (i, row) in zip(of_engines, rows, strict=True)]
    expected = {
        **{name: recomputed[name] for name in recomputed if name in DRIFT},
        "rollout/kl": np.mean([own.sum() for own in drifts]),
        "rollout/kl_per_token": np.concatenate(drifts).mean(),
        "rollout/kl_token_mean": np.mean([own.mean() for own in drifts]),
        "rollout/entropy": -np.mean([own.sum() for own in of_engines]),
    }
    measured = {}
    for method in ENGINES:
        told, _ = step({**penalised, "correction": {"old_logprobs": method}}, recomputed=False)
        measured[method] = (told, expected)
    return (found, measured) if actor.reports else ({}, {})


LAYOUTS = [
    # layout, tokens per micro-batch, chunks
    (Layout(), 20, 4),
    (Layout(tp=2, dp=2), 40, 4),
    (Layout(pp=2, vpp=2, dp=2), 40, 4),
    (Layout(dp=4), 40, 1),  # a rank has no sample
]


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "budget", "chunks"), LAYOUTS, ids=case_id)
def test_skipping_the_pass_before_the_update_is_exact(
    pool: RankPool, tmp_path: Path, layout: Layout, budget: int, chunks: int
) -> None:
    directory, other = (save_model(tmp_path / name, seed=seed) for seed, name in enumerate(("policy", "reference")))
    results = pool.run(_both, directory, other, layout, budget, chunks, world_size=layout.world_size)
    for found, measured in results:
        for method, (told, expected) in measured.items():
            assert expected.keys() > {*DRIFT}, method
            assert {name: told[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6), method
            assert abs(told["objective/kl"] - told["rollout/kl"]) > 0.01, "the engines sampled with older weights"
        for name, (known, recomputed, apart) in found.items():
            assert known.keys() == recomputed.keys(), name
            assert known == pytest.approx(recomputed, rel=1e-5, abs=1e-6), name
            assert known["policy/grad_norm"] > 0.1, name
            assert known["policy/ratio_min"] == known["policy/ratio_max"] == 1.0, name
            assert known["rollout/logprob_gap"] > 0.05, name
            # The passes pack samples differently, so that products may be rounded differently; here none was.
            assert apart < 1e-5, name
