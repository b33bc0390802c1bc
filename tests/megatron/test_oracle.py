"""A whole PPO iteration under every layout against the naive one: losses, gradient norms, metrics, updated weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.schema import KL, Algo, Optimizer
from megarl.types import Layout
from tests.megatron.samples import random_chunks
from tests.megatron.test_parity import layout_id
from tests.megatron.tiny import load_role, save_model
from tests.pool import RankPool

TEMPERATURE, SEED, STEP, HIDDEN = 0.9, 7, 2, 32
ALGO = Algo(
    gamma=0.99,
    lam=0.95,
    clip=0.1,
    value_clip=0.1,
    entropy_coef=0.01,
    kl=KL(coef=0.05),
    score_clip=1.5,
    missing_end_score=-1.0,
    ppo_epochs=2,
    mini_batches=2,
)
# Adam divides by the gradient's own size: with a small eps, elements whose gradient is all rounding would move by lr.
ACTOR = Optimizer(lr=1e-3, eps=1e-4, weight_decay=0.1, clip_grad=1.0)
CRITIC = Optimizer(lr=3e-3, eps=1e-4, weight_decay=0.0, clip_grad=None)


def _head() -> torch.Tensor:
    return 0.2 * torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(5))


def _scores() -> dict[int, np.ndarray]:
    return {c: np.random.default_rng(c).normal(size=3).astype(np.float32) * 2 for c in range(4)}


def _shaped(rollouts: list[Any]) -> dict[int, np.ndarray]:
    """The scores as the driver gives them to the experience."""
    from megarl.algos.rewards import shape_scores

    settings = {"clip": ALGO.score_clip, "missing_end": ALGO.missing_end_score}
    return {
        c: shape_scores(torch.from_numpy(scores), torch.from_numpy(rollouts[c].finished), **settings).numpy()
        for c, scores in _scores().items()
    }


def _iteration(rank: int, directory: Path, reference: Path, layouts: dict[str, Layout], budget: int) -> dict[str, Any]:
    """Actor, critic and reference in one world, each in its own layout."""
    import torch.distributed as dist

    from megarl.data.schedule import inference_schedule, update_schedules
    from megarl.megatron.experience import Columns, build_experience
    from megarl.megatron.groups import GroupCache
    from megarl.megatron.losses import policy_loss, value_loss

    rollouts, infos = random_chunks()
    cache = GroupCache()
    roles = {
        name: load_role(
            reference if name == "reference" else directory,
            name,
            layout,
            rank,
            cache,
            trainable=name != "reference",
            head=_head() if name == "critic" else None,
        )
        for name, layout in layouts.items()
    }
    actor, critic, ref = roles["actor"], roles["critic"], roles["reference"]
    actor.start_training(ACTOR, total_steps=4)
    critic.start_training(CRITIC, total_steps=4)

    def everywhere(column: dict[int, Any] | None) -> dict[int, Any]:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, column)
        return {chunk: rows for part in parts if part for chunk, rows in part.items()}

    def passes(role: Any) -> Any:
        return inference_schedule(infos, role.layout, budget).ranks[role.coords.dp]

    old = everywhere(actor.logprobs(passes(actor), rollouts, temperature=TEMPERATURE))
    columns = Columns(
        old_logprobs=old,
        ref_logprobs=everywhere(ref.logprobs(passes(ref), rollouts, temperature=TEMPERATURE)),
        values=everywhere(critic.values(passes(critic), rollouts)),
        scores=_shaped(rollouts),
        outcomes=None,
    )

    def reduce(vector: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(vector, group=actor.model.groups.dp)
        return vector

    built, _ = build_experience(passes(actor).chunks, rollouts, columns, ALGO, reduce, kl_coef=ALGO.kl.coef)
    experience = everywhere(built if actor.reports else None)
    plan = {"mini_batches": ALGO.mini_batches, "epochs": ALGO.ppo_epochs, "seed": SEED, "step": STEP}
    result: dict[str, Any] = {}
    for role, loss in (
        (actor, policy_loss(actor, ALGO, experience, temperature=TEMPERATURE, kl_coef=ALGO.kl.coef)),
        (critic, value_loss(critic, ALGO, experience)),
    ):
        result[role.name] = {
            "steps": role.update(
                [s.ranks[role.coords.dp] for s in update_schedules(infos, role.layout, budget, **plan)],
                experience,
                loss,
            ),
            "reports": role.reports,
            "pieces": _canonical_pieces(role),
        }
    return result


def _canonical_pieces(role: Any) -> list[tuple[str, tuple[slice, ...], torch.Tensor]]:
    parameters = {name: parameter.detach() for name, parameter in role.model.parameters().items()}
    return [(p.name, p.region.slices, parameters[p.param][p.box.slices].clone()) for p in role.shard_map.pieces]


def _oracle(directory: Path, reference: Path) -> Any:
    from megarl.data.schedule import mini_batch_members
    from tests.oracle import ppo

    config = json.loads((directory / "config.json").read_text())
    state, ref_state = (_state(path) for path in (directory, reference))
    body = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    rollouts, infos = random_chunks()
    samples = [
        ppo.Sample(
            sample_id=sample_id,
            prompt_ids=chunk.prompt_ids[row].tolist(),
            response_ids=chunk.response_ids[row].tolist(),
            score=float(_scores()[c][row]),
            finished=bool(chunk.finished[row]),
        )
        for c, chunk in enumerate(rollouts)
        for row, sample_id in enumerate(chunk.sample_ids)
    ]
    batches = [
        [info.sample_id for info in members]
        for epoch in range(ALGO.ppo_epochs)
        for members in mini_batch_members(infos, ALGO.mini_batches, seed=SEED, step=STEP, epoch=epoch)
    ]

    def adam(settings: Optimizer) -> Any:
        return ppo.AdamSettings(**settings.model_dump(exclude={"schedule", "warmup", "final_lr"}))

    return ppo.ppo_iteration(
        ppo.causal_lm(config, state),
        ppo.causal_lm(config, ref_state),
        ppo.headed_model({**config, "tie_word_embeddings": False}, {**body, "score.weight": _head()}),
        samples,
        batches,
        ppo.Settings(
            actor=adam(ACTOR),
            critic=adam(CRITIC),
            temperature=TEMPERATURE,
            gamma=ALGO.gamma,
            lam=ALGO.lam,
            clip=ALGO.clip,
            value_clip=ALGO.value_clip,
            entropy_coef=ALGO.entropy_coef,
            kl_coef=ALGO.kl.coef,
            score_clip=ALGO.score_clip,
            missing_end_score=ALGO.missing_end_score,
        ),
    )


def _state(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module", params=["untied", "tied"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    tied = request.param == "tied"
    directory = save_model(tmp_path_factory.mktemp("policy"), tie_word_embeddings=tied)
    reference = save_model(tmp_path_factory.mktemp("reference"), seed=1, tie_word_embeddings=tied)
    return directory, reference, _oracle(directory, reference)


ONE = Layout()
TP2, PP2, DP2 = Layout(tp=2), Layout(pp=2), Layout(dp=2)
SP2 = Layout(tp=2, sequence_parallel=True)
CASES = [
    # actor, critic, reference, tokens per micro-batch
    (ONE, ONE, ONE, 1000),
    (ONE, ONE, ONE, 20),
    (TP2, PP2, DP2, 40),
    (PP2, DP2, SP2, 40),
    (DP2, SP2, TP2, 40),
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


def _case_id(value: object) -> str:
    return layout_id(value) if isinstance(value, Layout) else str(value)


@pytest.mark.dist
@pytest.mark.parametrize(("actor", "critic", "reference", "budget"), CASES, ids=_case_id)
def test_equals_the_naive_iteration(
    pool: RankPool, case: tuple[Path, Path, Any], actor: Layout, critic: Layout, reference: Layout, budget: int
) -> None:
    directory, other, oracle = case
    layouts = {"actor": actor, "critic": critic, "reference": reference}
    results = pool.run(_iteration, directory, other, layouts, budget, world_size=actor.world_size)
    for name, steps, model, optimizer in (
        ("actor", oracle.actor_steps, oracle.actor, ACTOR),
        ("critic", oracle.critic_steps, oracle.critic, CRITIC),
    ):
        for result in results:
            _check_steps(result[name], steps)
        start = {**_state(directory), "score.weight": _head()}
        _check_weights(
            name, [result[name]["pieces"] for result in results], dict(model.named_parameters()), start, optimizer
        )


def _check_steps(found: dict[str, Any], steps: list[Any]) -> None:
    assert len(found["steps"]) == len(steps) == ALGO.ppo_epochs * ALGO.mini_batches
    for got, want in zip(found["steps"], steps, strict=True):
        assert got["grad_norm"] == pytest.approx(want.grad_norm, rel=1e-5)
        assert got["skipped"] == 0.0
        if found["reports"]:
            # Advantages are whitened, so the terms of a loss cancel. What is left has the rounding of their ratios,
            # which is that of log-probabilities of about 10 nats: 1e-6.
            assert got["loss"] == pytest.approx(want.loss, rel=1e-5, abs=1e-6)
            for metric, value in want.metrics.items():
                # Squares and differences of log-probabilities that are near each other: the same, relative to less.
                assert got[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric


def _check_weights(
    name: str, ranks: list[Any], want: dict[str, torch.Tensor], start: dict[str, torch.Tensor], optimizer: Optimizer
) -> None:
    """Every replica of every piece, against how far the parameter moved."""
    seen = set()
    for pieces in ranks:
        for tensor, region, value in pieces:
            expected = want[tensor].detach()[region]
            moved = (expected - start[tensor][region]).abs().max().item()
            worst = (value - expected).abs().max().item()
            # A gradient is the same to 1e-5; in the worst element, where it is small, Adam's quotient magnifies that.
            assert worst <= 1e-3 * moved + 1e-6, (
                f"{name} {tensor}{region} is off by {worst:.2e}; it moved by {moved:.2e}"
            )
            seen.add(tensor)
    assert seen == set(want), f"{name}: {sorted(seen ^ set(want))}"


def _single_samples(rank: int, directory: Path, layout: Layout) -> list[tuple[float, float]]:
    """An update with one sample per optimizer step, so that most DP ranks have masked packs alone."""
    from megarl.data.schedule import update_schedules
    from megarl.megatron.groups import GroupCache
    from megarl.megatron.heads import response_logprobs

    rollouts, infos = random_chunks()
    actor = load_role(directory, "actor", layout, rank, GroupCache(), trainable=True, head=None)
    actor.start_training(ACTOR, total_steps=12)

    def loss(batch: Any, hidden: torch.Tensor) -> Any:
        logprobs, entropy = response_logprobs(actor.model, batch, hidden, vocab_size=100, temperature=1.0)
        return (0.1 * entropy - logprobs).sum() / 10, {}

    plan = update_schedules(infos, layout, 40, mini_batches=len(infos), epochs=1, seed=0, step=0)
    steps = actor.update([s.ranks[actor.coords.dp] for s in plan], rollouts, lambda _schedule: loss)
    return [(step["loss"], step["grad_norm"]) for step in steps] if actor.reports else []


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout", [Layout(dp=4), replace(SP2, pp=2), Layout(pp=2, vpp=2, dp=2), Layout(tp=2, dp=2)], ids=_case_id
)
def test_ranks_without_rows_add_nothing(pool: RankPool, tmp_path: Path, layout: Layout) -> None:
    directory = save_model(tmp_path / "model")
    (alone,) = pool.run(_single_samples, directory, ONE, world_size=1)
    found = [steps for steps in pool.run(_single_samples, directory, layout, world_size=4) if steps]
    assert len(found) == layout.dp
    for steps in found:
        # Twelve steps, each on the weights that the others left.
        assert np.array(steps) == pytest.approx(np.array(alone), rel=2e-5)
