"""MoE models against Hugging Face and naive training steps, with the experts on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.types import Layout
from tests.megatron.compare import state_of, trained
from tests.megatron.mixtures import MIXTURES, save_mixture
from tests.megatron.samples import random_chunks
from tests.megatron.supervised import (
    SETTINGS,
    Naive,
    check_steps,
    fine_tuned,
    headed_state,
    preferences,
    rewarded,
    sft,
    two_steps,
)
from tests.megatron.test_parity import expectations, infer, worst_differences
from tests.megatron.tiny import load_role
from tests.pool import RankPool

pytestmark = pytest.mark.dist

EP = Layout(dp=2, ep=2)
LAYOUTS = {
    "dp2": Layout(dp=2),
    "dp2-ep2": EP,
    "dp4-ep2": Layout(dp=4, ep=2),
    "pp2-dp2-ep2": Layout(pp=2, dp=2, ep=2),
    "pp2-vpp2-dp2-ep2": Layout(pp=2, vpp=2, dp=2, ep=2),
    "tp2-sp-dp2-ep2": Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
}
ALONE = {"alone": Layout(), "dp3-ep3": Layout(dp=3, ep=3), "tp2-sp": Layout(tp=2, sequence_parallel=True)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_mixture(tmp_path_factory.mktemp(name), name) for name in MIXTURES}


def _cases(*names: str, **layouts: Layout) -> list[Any]:
    """Models in layouts."""
    pairs = [(name, label) for name in names for label in layouts]
    return [pytest.param(name, layouts[label], id=f"{name}-{label}") for name, label in pairs]


@pytest.mark.parametrize(("name", "layout"), _cases(*MIXTURES, alone=Layout(), ep2=EP))
def test_an_moe_model_equals_hugging_face(pool: RankPool, models: dict[str, Path], name: str, layout: Layout) -> None:
    results = pool.run(infer, models[name], layout, 40, world_size=layout.world_size)
    for what, worst in worst_differences(results, expectations(models[name])).items():
        assert worst <= 1e-5, f"{what} differ from Hugging Face by {worst:.2e}"


@pytest.fixture(scope="module")
def demonstrated(models: dict[str, Path]) -> dict[str, Naive]:
    return {name: fine_tuned(directory) for name, directory in models.items()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *_cases("mixtral", **LAYOUTS),
        *_cases("qwen3_moe", **{label: LAYOUTS[label] for label in ("pp2-vpp2-dp2-ep2", "tp2-sp-dp2-ep2")}),
    ],
)
def test_fine_tuning_an_moe_model_equals_the_naive_one(
    pool: RankPool, models: dict[str, Path], demonstrated: dict[str, Naive], name: str, layout: Layout
) -> None:
    results = pool.run(two_steps, models[name], "actor", layout, 40, sft, world_size=layout.world_size)
    check_steps(results, demonstrated[name], state_of(models[name]))


@pytest.mark.parametrize(("name", "layout"), _cases("qwen3_moe_renormalised", **ALONE))
def test_an_moe_reward_model_equals_the_naive_one(
    pool: RankPool, models: dict[str, Path], name: str, layout: Layout
) -> None:
    results = pool.run(two_steps, models[name], "reward", layout, 40, preferences, world_size=layout.world_size)
    check_steps(results, rewarded(models[name]), headed_state(models[name]))


def _one_sample(rank: int, directory: Path, layout: Layout, recompute: str) -> tuple[Any, Any, int]:
    """A forward pass and a step on one sample, with an offload in between."""
    from megarl.data.schedule import inference_schedule, step_schedule
    from megarl.megatron.parallel import GroupCache

    chunks, infos = random_chunks(chunks=1, rows=1)
    cache = GroupCache()
    role = load_role(directory, "actor", layout, rank, cache, trainable=True, head=None, recompute=recompute)
    role.start_training(SETTINGS, total_steps=1)
    dp = role.coords.dp
    before = role.logprobs(inference_schedule(infos, layout, 40).ranks[dp], chunks, temperature=1.0)
    released = role.offload()
    role.onload()
    steps = role.update([step_schedule(infos, layout, 40).ranks[dp]], chunks, sft(role))
    return before, trained(role, steps), released


def test_a_rank_without_samples_takes_part_in_expert_parallelism(pool: RankPool, models: dict[str, Path]) -> None:
    """One sample on two replicas: the other one computes padding, in training with whole layers computed again too."""
    directory = models["mixtral"]
    ((expected, alone, _),) = pool.run(_one_sample, directory, Layout(), "none", world_size=1)
    start = state_of(directory)
    whole = {name: value for name, _, value in alone["shards"] if value.shape == start[name].shape}
    results = pool.run(_one_sample, directory, EP, "full", world_size=2)
    assert [sorted(before) for before, _, _ in results] == [[0], []], "the second replica has no sample"
    assert results[0][0][0][0] == pytest.approx(expected[0][0], abs=1e-5)
    for _, shared, released in results:
        step, want = shared["steps"][0], alone["steps"][0]
        assert [step[key] for key in ("loss", "grad_norm")] == pytest.approx(
            [want[key] for key in ("loss", "grad_norm")], rel=1e-5
        )
        assert released >= sum(value.nbytes for _, _, value in shared["shards"])
        for name, region, value in shared["shards"]:
            if name in whole:
                moved = (whole[name] - start[name]).abs().max()
                assert (value - whole[name][region]).abs().max() <= 1e-3 * moved + 1e-6, name
    experts = [{name for name, *_ in shared["shards"] if ".experts." in name} for _, shared, _ in results]
    assert not experts[0] & experts[1]
    assert len(experts[0]) == len(experts[1]) == 5 * 3 * 3
