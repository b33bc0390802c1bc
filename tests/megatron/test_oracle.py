"""A whole iteration under every layout against the naive one: losses, gradient norms, metrics, updated weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megarl.config.schema import Algo, Optimizer, Reward
from megarl.config.schema.loss_specs import PolicySpec
from megarl.data.schedule import inference_schedule, mini_batch_members, update_schedules
from megarl.experience.build import build_experience
from megarl.experience.padded_batch import Columns
from megarl.experience.records import SampleScores, StepContext
from megarl.loop.scoring import ScoredSamples, reward_weights, score_batch
from megarl.megatron.losses import PolicyLoss, value_loss
from megarl.megatron.parallel import GroupCache
from megarl.types import Layout, Ragged, RolloutChunk, SampleInfo
from tests.e2e.recipe_cases import CASES as RECIPES
from tests.e2e.recipe_cases import IN_MATRIX
from tests.e2e.runs import ROOT
from tests.megatron.compare import (
    adam_of,
    check,
    everywhere,
    logprobs_by_chunk,
    reductions_over,
    samples_of,
    state_of,
    trained,
)
from tests.megatron.samples import conversations, random_chunks, with_given, with_kept
from tests.megatron.test_parity import case_id
from tests.megatron.tiny import load_role, random_head, save_model
from tests.oracle import advantages, aggregation, comparisons, kl, models, normalisation, policy, ppo, scores, values
from tests.pool import RankPool

TEMPERATURE, SEED, STEP = 0.9, 7, 2
PPO = Algo.model_validate(
    {
        "advantage": {"name": "gae", "gamma": 0.99, "lam": 0.95},
        "policy_loss": {"name": "ppo", "clip": 0.1},
        "value_loss": {"name": "mse", "clip": 0.1},
        "entropy_coef": 0.01,
        "kl": {"coef": 0.05},
        "scores": {"clip": 1.5, "missing_end": {"name": "replace", "score": -1.0}},
        "ppo_epochs": 2,
        "mini_batches": 2,
    }
)
GRPO = Algo.model_validate(
    {
        "advantage": "grpo",
        "policy_loss": {"name": "ppo", "clip": 0.1},
        "kl": {"in": "loss", "estimator": "k3", "coef": 0.2},
        "aggregation": "sequence_mean",
        "scores": {"clip": 1.5},
        "ppo_epochs": 2,
        "mini_batches": 2,
    }
)
# Adam divides by the gradient's own size: with a small eps, elements whose gradient is all rounding would move by lr.
# And with a large lr nearly all that the actor learns from would be clipped in the end: what is left of the gradient, a
# fiftieth of those before, has their rounding. Measured, grad_norm off by up to 12e-6 with 1e-3, by 2.4e-6 with 2e-4.
ACTOR = Optimizer(lr=2e-4, eps=1e-4, weight_decay=0.1, clip_grad=1.0)
CRITIC = Optimizer(lr=3e-3, eps=1e-4, weight_decay=0.0, clip_grad=None)
NAIVE_PPO = ppo.Settings(
    actor=adam_of(ACTOR),
    critic=adam_of(CRITIC),
    temperature=TEMPERATURE,
    shapes=[partial(scores.clipped, low=-1.5, high=1.5), partial(scores.replaced, score_of_unfinished=-1.0)],
    kl_coef=0.05,
    estimate=partial(advantages.gae, gamma=0.99, lam=0.95),
    normalise=normalisation.whiten,
    policy=partial(policy.ppo, clip=0.1),
    value=partial(values.mse, clip=0.1),
    entropy_coef=0.01,
)
NAIVE_GRPO = ppo.Settings(
    actor=adam_of(ACTOR),
    temperature=TEMPERATURE,
    shapes=[partial(scores.clipped, low=-1.5, high=1.5)],
    kl_coef=0.2,
    kl_estimate=kl.k3,
    kl_in_loss=True,
    compare=comparisons.grpo,
    policy=partial(policy.ppo, clip=0.1),
    aggregate=aggregation.sequence_mean,
)
"""The same for the oracle."""


def _scores() -> dict[int, np.ndarray]:
    return {c: np.random.default_rng(c).normal(size=3).astype(np.float32) * 2 for c in range(4)}


def _prompt(info: SampleInfo) -> int:
    """The prompt of a sample: groups of four, one from each chunk."""
    return info.row


def _iteration(
    rank: int,
    directory: Path,
    reference: Path,
    layouts: dict[str, Layout],
    budget: int,
    algo: Algo,
    facts: SampleScores,
    optimizers: tuple[Optimizer, Optimizer] = (ACTOR, CRITIC),
    rollouts: list[RolloutChunk] | None = None,
) -> list[dict[str, Any]]:
    """Actor, critic (where there is one) and reference in one world, each in its own layout."""
    random, infos = random_chunks()
    rollouts = rollouts or random
    infos = with_given(infos, rollouts)
    cache = GroupCache()
    roles = {
        name: load_role(
            reference if name == "reference" else directory,
            name,
            layout,
            rank,
            cache,
            trainable=name != "reference",
            head=random_head(directory) if name == "critic" else None,
        )
        for name, layout in layouts.items()
    }
    actor, critic = roles["actor"], roles.get("critic")
    for name, settings in zip(("actor", "critic"), optimizers, strict=True):
        if name in roles:
            roles[name].start_training(settings, total_steps=4)

    def passes(role: Any) -> Any:
        return inference_schedule(infos, role.layout, budget).ranks[role.coords.dp]

    columns = _columns(rollouts, roles, passes, facts)
    records_kept = rollouts[0].kept_counts is not None
    terms = StepContext(kl_coef=algo.kl.coef, version=0, groups=3, records_kept=records_kept)
    reductions = reductions_over(actor.model.groups.dp)
    built, _ = build_experience(passes(actor).chunks, rollouts, columns, algo, None, terms, *reductions)
    experience = everywhere(built if actor.reports else None)
    spec = PolicySpec(algo=algo, temperature=TEMPERATURE)
    losses = {"actor": partial(PolicyLoss, actor, spec, experience, kl_coef=algo.kl.coef)}
    if critic is not None:
        losses["critic"] = partial(value_loss, critic, algo, experience)
    results = []
    for name, loss in losses.items():
        role = roles[name]
        plan = {"mini_batches": algo.mini_batches, "epochs": algo.ppo_epochs, "seed": SEED, "step": STEP}
        schedules = [s.ranks[role.coords.dp] for s in update_schedules(infos, role.layout, budget, **plan)]
        results.append(trained(role, role.update(schedules, experience, loss)))
    return results


def _facts(algo: Algo) -> SampleScores:
    """As the driver makes them."""
    infos = [replace(info, prompt_id=str(_prompt(info))) for info in random_chunks()[1]]
    raw = np.array([_scores()[info.chunk][info.row] for info in infos])
    scored = ScoredSamples(samples=infos, scores={"reward_model": raw})
    return score_batch(infos, scored, None, reward_weights(Reward()), algo, order=None).samples


def _columns(rollouts: list[Any], roles: dict[str, Any], passes: Any, facts: SampleScores) -> Columns:
    actor, ref, critic = roles["actor"], roles["reference"], roles.get("critic")
    return Columns(
        samples=facts,
        old_logprobs=everywhere(logprobs_by_chunk(actor, passes(actor), rollouts, TEMPERATURE)),
        ref_logprobs=everywhere(logprobs_by_chunk(ref, passes(ref), rollouts, TEMPERATURE)),
        values=None if critic is None else everywhere(critic.values(passes(critic), rollouts)),
        dense=None,
    )


def _oracle(
    directory: Path, reference: Path, settings: ppo.Settings, rollouts: list[RolloutChunk] | None = None
) -> Any:
    config = json.loads((directory / "config.json").read_text())
    state = state_of(directory)
    body = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    random, infos = random_chunks()
    rollouts = rollouts or random
    batches = [
        [info.sample_id for info in members]
        for epoch in range(2)
        for members in mini_batch_members(infos, 2, seed=SEED, step=STEP, epoch=epoch)
    ]
    headed = {**body, "score.weight": random_head(directory)}
    critic = models.headed_model({**config, "tie_word_embeddings": False}, headed)
    return ppo.ppo_iteration(
        models.causal_lm(config, state),
        models.causal_lm(config, state_of(reference)),
        None if settings.critic is None else critic,
        samples_of(
            rollouts,
            infos,
            group=_prompt,
            score=lambda info: float(_scores()[info.chunk][info.row]),
            rollout_logprobs=lambda info: rollouts[info.chunk].rollout_logprobs[info.row].tolist(),
        ),
        batches,
        settings,
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The reference is near the policy, where k3 is not clamped."""
    from safetensors.torch import save_file

    directory = save_model(tmp_path_factory.mktemp("policy"))
    reference = save_model(tmp_path_factory.mktemp("reference"))
    random = torch.Generator().manual_seed(3)
    state = {name: p + 0.02 * torch.randn(p.shape, generator=random) for name, p in state_of(reference).items()}
    save_file(state, reference / "model.safetensors", metadata={"format": "pt"})
    return directory, reference


ONE = Layout()
TP2, PP2, DP2 = Layout(tp=2), Layout(pp=2), Layout(dp=2)
SP2 = Layout(tp=2, sequence_parallel=True)
CASES = [
    # actor, critic, reference, tokens per micro-batch
    (ONE, ONE, ONE, 20),
    (SP2, TP2, PP2, 40),
    (Layout(pp=2, vpp=2), Layout(pp=2, vpp=2), PP2, 40),
    (Layout(tp=2, pp=2), replace(PP2, dp=2), replace(TP2, dp=2), 40),
    (Layout(tp=2, dp=2), Layout(tp=2, pp=2), Layout(dp=4), 40),
    (Layout(tp=4), Layout(pp=4), Layout(tp=4, sequence_parallel=True), 40),
    (Layout(pp=4), Layout(dp=4), Layout(tp=4), 40),
    (Layout(dp=4), Layout(tp=4), Layout(pp=4), 40),
    (Layout(tp=2, pp=2, vpp=2, sequence_parallel=True), replace(SP2, dp=2), replace(SP2, pp=2), 40),
    (Layout(pp=2, vpp=2, dp=2), Layout(pp=2, vpp=2, dp=2), Layout(dp=4), 40),
]
COMPARED = [
    (ONE, None, ONE, 20),
    (PP2, None, DP2, 40),
    (Layout(tp=2, pp=2, vpp=2), None, Layout(tp=4), 40),
    (replace(SP2, dp=2), None, replace(PP2, dp=2), 40),
    (Layout(dp=4), None, Layout(pp=4), 40),
]
TALKS = [
    ("talks", ONE, ONE, ONE, 1000),
    ("talks", Layout(tp=2, pp=2), replace(SP2, dp=2), Layout(dp=4), 60),
    ("talks without critic", Layout(tp=2, dp=2), None, Layout(pp=2, dp=2), 60),
]
KEPT = [
    ("kept", Layout(tp=4), Layout(pp=4), Layout(tp=4, sequence_parallel=True), 40),
    ("kept without critic", replace(SP2, pp=2, vpp=2), None, Layout(tp=4), 40),
    ("talks kept", Layout(tp=2, dp=2), replace(SP2, dp=2), Layout(dp=4), 60),
]
"""Of some of the ids each token was sampled."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, compared: tuple[Path, Path]) -> Callable[[str], Any]:
    """By kind: the algorithm, policy and reference, the naive iteration, and the rollouts, if they are not random.

    The layers of the tied gpt2 are five, which no number of stages divides.
    """

    @cache
    def case(kind: str) -> tuple[Algo, Path, Path, Any, list[RolloutChunk] | None]:
        rollouts = conversations(random_chunks()[0]) if kind.startswith("talks") else None
        if "kept" in kind:
            rollouts = with_kept(rollouts or random_chunks()[0])
        algo, naive = (GRPO, NAIVE_GRPO) if kind.endswith("without critic") else (PPO, NAIVE_PPO)
        if kind in ("qwen2", "gpt2"):
            fields = {"n_layer": 5} if kind == "gpt2" else {}
            directory, other = (
                save_model(tmp_path_factory.mktemp(kind), kind, seed=seed, **fields) for seed in range(2)
            )
        else:
            directory, other = compared
        return algo, directory, other, _oracle(directory, other, naive, rollouts), rollouts

    return case


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "actor", "critic", "reference", "budget"),
    [
        *(("qwen2", *CASES[index]) for index in (0, 1, 3, 5, 8, 9)),
        *(pytest.param("qwen2", *CASES[index], marks=pytest.mark.matrix) for index in (2, 4, 6, 7)),
        *(("gpt2", *CASES[index]) for index in (0, 8)),
        *(pytest.param("gpt2", *CASES[index], marks=pytest.mark.matrix) for index in (2, 3)),
        *(("without critic", *layouts) for layouts in COMPARED),
        *TALKS,
        *KEPT,
    ],
    ids=case_id,
)
def test_iteration_equals_the_naive_one(
    pool: RankPool,
    cases: Callable[[str], Any],
    kind: str,
    actor: Layout,
    critic: Layout | None,
    reference: Layout,
    budget: int,
) -> None:
    """In conversations, each sampled token has the loss and the gradient of a model that reads the concatenated ids."""
    algo, directory, other, oracle, rollouts = cases(kind)
    layouts = {"actor": actor, "critic": critic, "reference": reference}
    present = {name: layout for name, layout in layouts.items() if layout is not None}
    args = (directory, other, present, budget, algo, _facts(algo), (ACTOR, CRITIC), rollouts)
    _check(list(zip(*pool.run(_iteration, *args, world_size=actor.world_size), strict=True)), oracle, directory)
    if kind == "without critic":
        assert oracle.actor_steps[0].metrics["kl"] > 0.01, "the penalty does not count"


def _check(roles: list[Any], oracle: Any, directory: Path) -> None:
    """Checks the results of all ranks for the actor, and for the critic if there is one."""
    start = {**state_of(directory), "score.weight": random_head(directory)}
    check(list(roles[0]), oracle.actor_steps, oracle.actor, start)
    if len(roles) > 1:
        check(list(roles[1]), oracle.critic_steps, oracle.critic, start)


@pytest.fixture(scope="module")
def sampled(compared: tuple[Path, Path]) -> list[RolloutChunk]:
    """The chunks with rollout log-probabilities that are off by up to two nats per token."""
    directory, _ = compared
    chunks, infos = random_chunks()
    actor = models.causal_lm(json.loads((directory / "config.json").read_text()), state_of(directory))
    random = np.random.default_rng(5)
    found: dict[int, list[np.ndarray]] = {}
    for sample, info in zip(samples_of(chunks, infos), infos, strict=True):
        logprobs = models.token_statistics(actor, sample, TEMPERATURE)[0].detach().numpy()
        found.setdefault(info.chunk, []).append(logprobs + random.uniform(-2, 2, len(logprobs)))
    return [replace(chunk, rollout_logprobs=Ragged.from_rows(found[i], np.float32)) for i, chunk in enumerate(chunks)]


@pytest.mark.dist
@pytest.mark.parametrize("name", sorted(IN_MATRIX))
def test_a_recipe_equals_the_naive_iteration(
    pool: RankPool, compared: tuple[Path, Path], sampled: list[RolloutChunk], name: str
) -> None:
    """Its algorithm and its optimizers; texts, filters and EMA have their own tests."""
    directory, other = compared
    recipe = yaml.safe_load((ROOT / f"configs/recipes/{name}.yaml").read_text())
    algo = Algo.model_validate({**recipe["algo"], "ppo_epochs": 2, "mini_batches": 2})
    constant = {"schedule": "constant", "warmup": 0.0, "final_lr": 0.0}
    actor, critic = (
        Optimizer.model_validate(
            {**recipe.get(role, {}).get("optimizer", {}), **constant, "lr": near.lr, "eps": near.eps}
        )
        for role, near in (("actor", ACTOR), ("critic", CRITIC))
    )
    own = RECIPES[name].settings
    settings = replace(
        own,
        shapes=[shape for shape in own.shapes if shape.func is not scores.overlong],  # a reward function of its own
        actor=replace(own.actor, lr=ACTOR.lr, eps=ACTOR.eps),
        critic=own.critic and replace(own.critic, lr=CRITIC.lr, eps=CRITIC.eps),
        temperature=TEMPERATURE,
        mixing="add",
        mixing_coef=0.0,
    )
    oracle = _oracle(directory, other, settings, sampled)
    if own.weigh:
        weights = {weight for experience in oracle.experience.values() for weight in experience.weights}
        assert min(weights) == 0 < max(weights), "the bounds had nothing to do"
    layouts = dict.fromkeys(["actor", *["critic"] * (own.critic is not None), "reference"], ONE)
    args = (directory, other, layouts, 1000, algo, _facts(algo), (actor, critic), sampled)
    _check([[role] for role in pool.run(_iteration, *args, world_size=1)[0]], oracle, directory)
