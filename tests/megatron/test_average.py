"""The EMA of a role's weights, and the reference's soft update, against plain recurrences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.megatron.optimizer import shards
from megarl.megatron.parallel import GroupCache
from megarl.types import Layout
from tests.megatron.compare import weights_of
from tests.megatron.test_parity import case_id
from tests.megatron.tiny import load_role, save_model
from tests.megatron.training import restore, save, train
from tests.pool import RankPool

pytestmark = pytest.mark.dist

LAYOUTS = [Layout(), Layout(tp=2, dp=2, sequence_parallel=True), Layout(pp=2, vpp=2, dp=2)]
SETTINGS = Optimizer(lr=3e-2)

Weights = dict[str, torch.Tensor]


def _weights(role: Any) -> Weights:
    return {name: weight.float() for name, weight in weights_of(role).items()}


def _averaged(role: Any) -> Weights:
    """The EMA, swapped into the model; afterwards the model has its weights again, bit for bit."""
    before = _weights(role)
    role.ema.swap_weights(True)
    role.ema.swap_weights(True)
    average = _weights(role)
    role.ema.swap_weights(False)
    after = _weights(role)
    assert all(torch.equal(after[name], before[name]) for name in before)
    return average


def _trained(rank: int, directory: Path, layout: Layout, dtype: torch.dtype, decay: float) -> tuple[Any, ...]:
    """The weights before and after each of four steps, of which one is skipped, and the average after each."""
    role = load_role(directory, "actor", layout, rank, trainable=True, dtype=dtype)
    role.start_training(SETTINGS, total_steps=4, decay=decay)
    weights, averages = [_weights(role)], [_averaged(role)]
    for step in range(4):
        train(role, step, 1, broken=[1])
        weights.append(_weights(role))
        averages.append(_averaged(role))
    return weights, averages


@pytest.mark.parametrize(("layout", "decay"), [*((layout, 0.75) for layout in LAYOUTS), (LAYOUTS[1], 0.0)], ids=case_id)
def test_the_ema_is_updated_after_every_taken_step(
    pool: RankPool, tmp_path: Path, layout: Layout, decay: float
) -> None:
    """With decay 0 it is the weights, in 16 bits too."""
    dtype = torch.float32 if decay else torch.bfloat16
    args = (save_model(tmp_path / "model"), layout, dtype, decay)
    for weights, averages in pool.run(_trained, *args, world_size=layout.world_size):
        expected = weights[0]
        for step, (now, average) in enumerate(zip(weights, averages, strict=True)):
            if step not in (0, 2):  # the second step is skipped
                expected = {name: decay * expected[name] + (1 - decay) * now[name] for name in now}
            bar = 1e-6 if decay else 0.0
            for name, values in average.items():
                torch.testing.assert_close(values, expected[name], rtol=bar, atol=bar)
        moved = max((weights[-1][name] - averages[-1][name]).abs().max() for name in weights[-1])
        assert (moved > 1e-3) == (decay > 0)


def _slow(rank: int, directory: Path) -> tuple[float, float]:
    """The movement of a slow EMA of bfloat16 weights: as kept, and in bfloat16; swapped in, it is refused."""
    role = load_role(directory, "actor", Layout(), rank, trainable=True, dtype=torch.bfloat16)
    role.start_training(Optimizer(lr=1e-4), total_steps=4, decay=0.999)
    start = {name: values.clone() for name, values in role.ema.values.items()}
    rounded = {name: values.bfloat16() for name, values in start.items()}
    for step in range(4):
        train(role, step, 1)
        for shard in shards(role.model, role.optimizer):
            rounded[shard.name] = 0.999 * rounded[shard.name] + 0.001 * shard.main.detach().bfloat16()
    kept = [(values - start[name]).abs().mean() for name, values in role.ema.values.items()]
    lost = [(values.float() - start[name]).abs().mean() for name, values in rounded.items()]
    role.ema.swap_weights(True)
    for use in (lambda: train(role, 4, 1), lambda: save(role, directory / "saved")):
        with pytest.raises(AssertionError, match="actor has its average for its weights"):
            use()
    return float(torch.stack(kept).mean()), float(torch.stack(lost).mean())


def test_the_ema_of_16_bit_weights_is_kept_in_float32(pool: RankPool, tmp_path: Path) -> None:
    """In 16 bits it would move by rounding alone, further than the weights themselves, or not at all."""
    ((kept, lost),) = pool.run(_slow, save_model(tmp_path / "model"), world_size=1)
    assert 1e-8 < kept < 1e-6
    assert not 0.1 * kept < lost < 10 * kept


def _following(
    rank: int, directory: Path, other: Path, layout: Layout, dtype: torch.dtype, out: Path
) -> tuple[Weights, ...]:
    """The actor after a step, the reference before and after its update, and another one with its state."""
    cache = GroupCache()
    make = {"layout": layout, "rank": rank, "cache": cache, "head": None, "dtype": dtype}
    actor = load_role(directory, "actor", trainable=True, **make)
    actor.start_training(SETTINGS, total_steps=1)
    train(actor, 0, 1)
    reference = load_role(other, "reference", trainable=False, **make)
    before = _weights(reference)
    reference.soft_update(actor, 0.6)
    save(reference, out)
    resumed = load_role(directory, "reference", trainable=False, **make)
    restore(resumed, out)
    return _weights(actor), before, _weights(reference), _weights(resumed)


@pytest.mark.parametrize(
    ("layout", "dtype"), [(LAYOUTS[1], torch.float32), (LAYOUTS[2], torch.bfloat16)], ids=["float32", "bfloat16"]
)
def test_the_reference_is_updated_and_resumed(
    pool: RankPool, tmp_path: Path, layout: Layout, dtype: torch.dtype
) -> None:
    directory, other = save_model(tmp_path / "model"), save_model(tmp_path / "other", seed=1)
    ranks = pool.run(_following, directory, other, layout, dtype, tmp_path / "reference", world_size=4)
    for actor, before, after, resumed in ranks:
        for name, values in after.items():
            want = (0.6 * actor[name] + 0.4 * before[name]).to(dtype).float()
            torch.testing.assert_close(values, want, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
            assert torch.equal(resumed[name], values), name
    replicas = [ranks[rank] for rank in range(4) if layout.coords(rank).tp == 0 and layout.coords(rank).pp == 0]
    for one in replicas[1:]:
        assert all(torch.equal(one[2][name], replicas[0][2][name]) for name in one[2]), "replicas differ"
