"""Texts in the actor's optimizer steps: with share 0 there are none, with share 1 there is nothing else."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import pytest

from megarl.data.batches import on_all_tokens
from megarl.data.schedule import step_schedule
from megarl.types import Layout
from tests.megatron.layouts import SETTINGS, TEXTS, Case, chunks, deviation, restart, samples, two_steps, updates
from tests.megatron.tiny import load_role, save_model
from tests.pool import RankPool

ALGO = {"policy_loss": "ppo", "entropy_coef": 0.01}
Found = dict[str, tuple[list[dict[str, float]], float]]


def _steps(rank: int, directory: Path, stored: Path) -> Found:
    """Two steps by the shares of the texts, and two of the texts alone; and how far apart those are that are the same.

    None takes no texts along.
    """
    from megarl.megatron.parallel import GroupCache
    from megarl.megatron.supervised_losses import text_loss

    columns = pickle.loads((stored / "experience").read_bytes())
    role = load_role(directory, "actor", Layout(), rank, GroupCache(), trainable=True, head=None)
    role.start_training(SETTINGS, total_steps=2, decay=0.6)
    start = {name: parameter.detach().clone() for name, parameter in role.model.parameters().items()}
    found: Found = {}
    for name, share, same in (("none", None, "rollouts"), ("share 0", 0.0, "rollouts"), ("share 1", 1.0, "texts")):
        restart(role, start)
        steps = two_steps(role, Case(algo=ALGO, texts=share), columns, 14)
        found[name] = steps, deviation(role, start, stored / f"{same}.pt")
    restart(role, start)
    texts = on_all_tokens(samples())
    plans = [step_schedule([texts[i] for i in members], Layout(), 14) for members in TEXTS]
    steps = role.update([plan.ranks[0] for plan in plans], chunks(), partial(text_loss, role))
    found["texts"] = steps, deviation(role, start, stored / "texts.pt")
    return found


@pytest.mark.dist
def test_share_0_has_no_texts_and_share_1_only_texts(pool: RankPool, tmp_path: Path) -> None:
    directory, stored = save_model(tmp_path / "model"), tmp_path / "stored"
    pool.run(updates, directory, Layout(), 1000, stored, world_size=1)
    (found,) = pool.run(_steps, directory, stored, world_size=1)
    assert all(away < 1e-5 for _, away in found.values())
    for one, other, lost in (("share 0", "none", {"ptx_loss"}), ("share 1", "texts", set[str]())):
        for step, want in zip(found[one][0], found[other][0], strict=True):
            same = {"loss", "grad_norm"} if one == "share 1" else step.keys() - lost
            assert {name: step[name] for name in same} == pytest.approx({name: want[name] for name in same}, rel=1e-5)
    for step in found["share 1"][0]:
        assert step["loss"] == pytest.approx(step["ptx_loss"], rel=1e-6)
    none, texts = (found[name][0][0]["grad_norm"] for name in ("none", "texts"))
    assert none != pytest.approx(texts, rel=1e-3), "what is compared above to 1e-5 differs"
