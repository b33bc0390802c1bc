"""Steps of supervised fine-tuning and of the reward model under every layout against the naive ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.types import Layout, SampleInfo
from tests.megatron.compare import adam_of, check, samples_of, state_of, trained
from tests.megatron.samples import random_chunks
from tests.megatron.test_parity import layout_id
from tests.megatron.tiny import load_role, save_model
from tests.oracle import ppo, supervised
from tests.pool import RankPool

CENTERING, HIDDEN = 0.05, 32
SETTINGS = Optimizer(lr=1e-3, eps=1e-4, weight_decay=0.1, clip_grad=1.0)
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
Batches = list[list[SampleInfo]]


def _case_id(value: object) -> str:
    return layout_id(value) if isinstance(value, Layout) else str(value)


def _head() -> torch.Tensor:
    return 0.2 * torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(5))


def _batches() -> tuple[list[Any], Batches]:
    """Chunks of two rows, and two steps of three chunks each."""
    chunks, infos = random_chunks(chunks=6, rows=2)
    return chunks, [infos[:6], infos[6:]]


def _sft(role: Any) -> Any:
    from megarl.megatron.losses import sft_loss

    return sft_loss(role)


def _preferences(role: Any) -> Any:
    from megarl.megatron.losses import preference_loss

    return preference_loss(role, CENTERING)


def _steps(
    rank: int, directory: Path, name: Any, layout: Layout, budget: int, loss_of: Callable[[Any], Any]
) -> tuple[dict[str, float], dict[str, Any]]:
    """The loss before the first step, by a forward pass alone; and both steps."""
    from megarl.data.schedule import step_schedule
    from megarl.megatron.groups import GroupCache

    chunks, batches = _batches()
    head, per_unit = (None, 1) if name == "actor" else (_head(), 2)
    role = load_role(directory, name, layout, rank, GroupCache(), trainable=True, head=head)
    role.start_training(SETTINGS, total_steps=len(batches))
    plans = [step_schedule(batch, layout, budget, rows_per_unit=per_unit) for batch in batches]
    own = [plan.ranks[role.coords.dp] for plan in plans]
    before = role.evaluate(own[0], chunks, loss_of(role))
    return before, trained(role, role.update(own, chunks, loss_of(role)))


def _check(results: list[Any], steps: list[ppo.Step], model: torch.nn.Module, start: dict[str, torch.Tensor]) -> None:
    check([own for _, own in results], steps, model, start)
    for before, own in results:
        if own["reports"]:
            first = {name: own["steps"][0][name] for name in before}
            assert before == pytest.approx(first, rel=1e-6), "a forward pass tells what the step tells"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fine_tuned(directory: Path) -> tuple[list[ppo.Step], torch.nn.Module]:
    chunks, batches = _batches()
    actor = ppo.causal_lm(json.loads((directory / "config.json").read_text()), state_of(directory))
    return supervised.fine_tune(actor, [samples_of(chunks, batch) for batch in batches], adam_of(SETTINGS))


@pytest.fixture(scope="module")
def rewarded(directory: Path) -> tuple[list[ppo.Step], torch.nn.Module]:
    chunks, batches = _batches()
    body = {name: tensor for name, tensor in state_of(directory).items() if name != "lm_head.weight"}
    config = json.loads((directory / "config.json").read_text())
    reward = ppo.headed_model(config, {**body, "score.weight": _head()})
    samples = [samples_of(chunks, batch) for batch in batches]
    pairs = [list(zip(batch[0::2], batch[1::2], strict=True)) for batch in samples]
    return supervised.train_reward(reward, pairs, adam_of(SETTINGS), centering=CENTERING)


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "budget"), CASES, ids=_case_id)
def test_fine_tuning_equals_the_naive_one(
    pool: RankPool, directory: Path, fine_tuned: Any, layout: Layout, budget: int
) -> None:
    results = pool.run(_steps, directory, "actor", layout, budget, _sft, world_size=layout.world_size)
    _check(results, *fine_tuned, state_of(directory))


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "budget"), CASES, ids=_case_id)
def test_the_reward_model_equals_the_naive_one(
    pool: RankPool, directory: Path, rewarded: Any, layout: Layout, budget: int
) -> None:
    results = pool.run(_steps, directory, "reward", layout, budget, _preferences, world_size=layout.world_size)
    assert 0 < rewarded[0][0].metrics["accuracy"] < 1, "pairs of both kinds"
    _check(results, *rewarded, {**state_of(directory), "score.weight": _head()})
