"""Invariants of an update: masked tokens change nothing; test_one_optimizer_step.py has the ratios of a first one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import Algo
from megarl.config.schema.loss_specs import PolicySpec
from megarl.data.schedule import inference_schedule, step_schedule
from megarl.experience.records import ExperienceChunk
from megarl.megatron.losses import PolicyLoss, value_loss
from megarl.megatron.parallel import GroupCache
from megarl.types import Layout, Ragged
from tests.megatron.compare import everywhere, logprobs_by_chunk, weights_of
from tests.megatron.layouts import KL_COEF, LEFT_OUT, SETTINGS, STEPS, TEMPERATURE, chunks, experience, restart, samples
from tests.megatron.tiny import load_role, random_head, save_model
from tests.pool import RankPool

LAYOUT = Layout(tp=2, dp=2)
EMPTY = {2, 5}
"""Samples without a response token."""
PLAIN = {"policy_loss": {"name": "ppo", "clip": 0.1}, "aggregation": "sequence_mean"}
STALE = {**PLAIN, "correction": {"old_logprobs": "loglinear", "weights": {"name": "token_mask", "upper": 5.0}}}

REGULAR = {**PLAIN, "entropy_coef": 0.1, "kl": {"in": "loss", "estimator": "k3", "coef": KL_COEF}}
VALUES = {"value_loss": {"name": "mse", "clip": 0.1}}

Reported = dict[str, dict[str, float]]


def _filled(column: Ragged, value: float) -> Ragged:
    return replace(column, values=column.values * 0 + value)


def _with(columns: Mapping[int, ExperienceChunk], **changes: Mapping[int, Ragged]) -> dict[int, ExperienceChunk]:
    return {i: replace(chunk, **{name: new[i] for name, new in changes.items()}) for i, chunk in columns.items()}


def _alternating(columns: Mapping[int, Ragged], first: bool) -> dict[int, Ragged]:
    """1 on every second token, from the first one or the second one of a chunk on, and 0 on the others."""
    return {
        i: replace(column, values=(np.arange(len(column.values)) % 2 == int(not first)).astype(np.float32))
        for i, column in columns.items()
    }


def _corrupted(index: int, chunk: ExperienceChunk) -> Ragged:
    """The returns, with arbitrary values where the critic is masked."""
    assert chunk.returns is not None
    spoilt = chunk.returns.values.copy()
    for row in range(3):
        if 3 * index + row in LEFT_OUT:
            spoilt[chunk.returns.offsets[row] : chunk.returns.offsets[row + 1]] = 1e6
    return replace(chunk.returns, values=spoilt)


def _updates(rank: int, directory: Path) -> Reported:
    """One step in several variants, by name; names of variants that must agree share a prefix."""
    cache, roles = GroupCache(), {}
    for name in ("actor", "critic"):
        head = random_head(directory) if name == "critic" else None
        roles[name] = load_role(directory, name, LAYOUT, rank, cache, trainable=True, head=head)
        roles[name].start_training(SETTINGS, total_steps=1, decay=0.5)
    actor, critic = roles["actor"], roles["critic"]
    start = {name: weights_of(role) for name, role in roles.items()}
    passes = inference_schedule(samples(), LAYOUT, 20).ranks[actor.coords.dp]
    now = everywhere(logprobs_by_chunk(actor, passes, chunks(), TEMPERATURE))
    columns = experience(now)
    reported: Reported = {}

    def step(
        name: str, fields: dict[str, Any], own: Any, members: list[int] = STEPS[0], longer: int = 0, first: bool = True
    ) -> None:
        role = critic if name.startswith("critic") else actor
        if first:
            restart(role, start[role.name])
        algo, everything = Algo.model_validate({"mini_batches": 2, **fields}), samples()
        ranked = step_schedule([everything[i] for i in members], LAYOUT, 20).ranks[role.coords.dp]
        loss = (
            partial(value_loss, role, algo, own)
            if role is critic
            else partial(PolicyLoss, role, PolicySpec(algo=algo, temperature=TEMPERATURE), own, kl_coef=KL_COEF)
        )
        (reported[name],) = role.update([replace(ranked, pack_tokens=ranked.pack_tokens + longer)], own, loss)

    step("nothing kept", REGULAR, _with(columns, actor_mask={i: _filled(c, 0.0) for i, c in now.items()}))
    step("critic of some", VALUES, _with(columns, returns={i: _corrupted(i, chunk) for i, chunk in columns.items()}))
    step("critic of these alone", VALUES, columns, [i for i in STEPS[0] if i not in LEFT_OUT])
    nothing = {i: _filled(c, 0.0) for i, c in now.items()}
    step("critic of some, the actor of nothing", VALUES, _with(columns, actor_mask=nothing))
    step("critic of nothing", VALUES, _with(columns, scored_mask=nothing))
    whole = {i: _filled(c, 1.0) for i, c in now.items()}
    step("all tokens", PLAIN, _with(columns, actor_mask=whole))
    step("odd tokens", PLAIN, _with(columns, actor_mask=_alternating(now, first=True)))
    step("even tokens", PLAIN, _with(columns, actor_mask=_alternating(now, first=False)))
    step("penalty", REGULAR, columns)
    step("penalty that has adapted", {**REGULAR, "kl": {**REGULAR["kl"], "coef": KL_COEF / 3}}, columns)
    step("same", PLAIN, columns)
    step("same without empty rows", PLAIN, columns, [i for i in STEPS[0] if i not in EMPTY])
    step("same with longer padding", PLAIN, columns, longer=17)
    step("same in another order", PLAIN, columns, STEPS[0][::-1])
    sampled = {i: chunk.rollout_logprobs for i, chunk in columns.items()}
    fresh = _with(columns, old_logprobs=sampled)
    step("decoupled", PLAIN, fresh)
    step(
        "decoupled from itself", STALE, _with(fresh, proximal_weights={i: _filled(c, 0.0) for i, c in sampled.items()})
    )
    step("a step before", PLAIN, columns)
    before = weights_of(actor)
    step("without a gradient", PLAIN, _with(columns, actor_mask=nothing), first=False)
    reported["moved"] = {
        name: float((parameter - before[name]).abs().max()) for name, parameter in actor.model.parameters().items()
    }
    return reported if actor.reports else {}


@pytest.fixture(scope="module")
def reported(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Reported:
    results = pool.run(_updates, save_model(tmp_path_factory.mktemp("model")), world_size=4)
    assert results[0] == results[2], "replicas tell of an update alike, bit for bit"
    return results[0]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["same", "decoupled", "penalty"])
def test_masked_tokens_change_nothing(reported: Reported, kind: str) -> None:
    alike = {name: step for name, step in reported.items() if name.startswith(kind)}
    assert len(alike) > 1
    assert alike[kind]["grad_norm"] > 0.1
    for name, step in alike.items():
        # Without a pass before the update, this is measured there.
        same = {metric: value for metric, value in step.items() if metric != "objective/entropy"}
        assert same == pytest.approx(alike[kind], rel=1e-5, abs=1e-6), name


@pytest.mark.dist
def test_masked_tokens_are_excluded_from_kl_penalty_and_entropy_bonus(reported: Reported) -> None:
    step = reported["nothing kept"]
    assert step["loss"] == step["policy_loss"] == step["kl_loss"] == step["grad_norm"] == 0.0
    assert step["kl"] > 0, "metrics are those of all tokens"


@pytest.mark.dist
def test_a_zero_gradient_still_takes_an_adam_step_with_momentum(reported: Reported) -> None:
    step = reported["without a gradient"]
    assert (step["grad_norm"], step["skipped"]) == (0.0, 0.0)
    assert min(reported["moved"].values()) > 0


@pytest.mark.dist
def test_tokens_masked_for_the_critic_are_in_none_of_its_metrics(reported: Reported) -> None:
    """Nor in its loss, whose denominator still counts all tokens."""
    some, alone = reported["critic of some"], reported["critic of these alone"]
    of_both = {"vpred", "error", "clipfrac", *(f"returns_{kind}" for kind in ("mean", "var", "max", "min"))}
    assert {name: some[name] for name in of_both} == pytest.approx({name: alone[name] for name in of_both}, rel=1e-5)
    everything = samples()
    tokens = [everything[i].response_tokens for i in STEPS[0]]
    left_out = sum(everything[i].response_tokens for i in LEFT_OUT.intersection(STEPS[0]))
    assert some["loss"] == pytest.approx(alone["loss"] * (1 - left_out / sum(tokens)), rel=1e-5)


@pytest.mark.dist
def test_the_critic_ignores_the_actor_mask(reported: Reported) -> None:
    assert reported["critic of some, the actor of nothing"]["loss"] == pytest.approx(
        reported["critic of some"]["loss"], rel=1e-5
    )
    assert reported["critic of nothing"]["loss"] == reported["critic of nothing"]["grad_norm"] == 0.0


@pytest.mark.dist
def test_masked_tokens_count_in_the_length_of_their_response(reported: Reported) -> None:
    """The weight of a token does not depend on which others are kept: the losses of two halves sum to the whole."""
    halves = [reported[f"{which} tokens"]["loss"] for which in ("odd", "even")]
    assert sum(halves) == pytest.approx(reported["all tokens"]["loss"], rel=1e-5)
    assert all(abs(half) > 1e-3 for half in halves)
