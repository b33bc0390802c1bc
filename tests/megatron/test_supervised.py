"""Steps of supervised fine-tuning and of the reward model under every layout against the naive ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.types import Layout
from tests.megatron.compare import state_of
from tests.megatron.supervised import (
    Naive,
    check_steps,
    fine_tuned,
    headed_state,
    preferences,
    rewarded,
    sft,
    two_steps,
)
from tests.megatron.test_parity import layout_id
from tests.megatron.tiny import save_model
from tests.pool import RankPool

ONE, SP2 = Layout(), Layout(tp=2, sequence_parallel=True)
CASES = [
    # layout, tokens per micro-batch
    (ONE, 1000),
    (ONE, 20),
    (Layout(tp=2), 40),
    (Layout(pp=2), 40),
    (Layout(dp=2), 40),
    (SP2, 40),
    (Layout(pp=2, vpp=2), 40),
    (replace(SP2, pp=2, vpp=2), 40),
    (Layout(tp=2, dp=2), 40),
    (Layout(pp=2, vpp=2, dp=2), 40),
    (Layout(dp=4), 40),  # a step has six demonstrations, or three pairs: one replica has none
]


def _case_id(value: object) -> str:
    return layout_id(value) if isinstance(value, Layout) else str(value)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def demonstrated(directory: Path) -> Naive:
    return fine_tuned(directory)


@pytest.fixture(scope="module")
def preferred(directory: Path) -> Naive:
    return rewarded(directory)


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "budget"), CASES, ids=_case_id)
def test_fine_tuning_equals_the_naive_one(
    pool: RankPool, directory: Path, demonstrated: Naive, layout: Layout, budget: int
) -> None:
    results = pool.run(two_steps, directory, "actor", layout, budget, sft, world_size=layout.world_size)
    check_steps(results, demonstrated, state_of(directory))


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "budget"), [CASES[1], *CASES[7:]], ids=_case_id)
def test_reward_model_training_equals_the_naive_one(
    pool: RankPool, directory: Path, preferred: Naive, layout: Layout, budget: int
) -> None:
    results = pool.run(two_steps, directory, "reward", layout, budget, preferences, world_size=layout.world_size)
    assert 0 < preferred[0][0].metrics["accuracy"] < 1, "pairs of both kinds"
    check_steps(results, preferred, headed_state(directory))
