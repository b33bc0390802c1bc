"""A worker's actor, reference and critic: a mixed step, the average, the soft sync, the head of a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import load
from megarl.data.batches import on_all_tokens
from megarl.data.schedule import inference_schedule, step_schedule, under_one_length
from megarl.megatron.worker_requests import ForwardRequest, UpdateRequest
from megarl.models import model_spec
from tests.convert.directories import make_directory, random_tensors
from tests.megatron.compare import everywhere, state_of
from tests.megatron.layouts import STEPS, TEXTS, chunks, experience, samples
from tests.megatron.test_worker import worker_of
from tests.megatron.tiny import save_model
from tests.pool import RankPool, free_port
from tests.weights.models import glm4_moe_config, qwen3_5_whole_config

ROLES = "groups.train.roles"
LAYOUT = [f"{ROLES}.{role}={{tp: 2, pp: 2, offload: true}}" for role in ("actor", "reference")]
OVERRIDES = [
    *LAYOUT,
    "actor.ema.decay=0.75",
    "algo.kl.reference_sync={every: 1, weight: 0.6}",
    "algo.entropy_coef=0.0",  # the reported entropy is not the loss's, which excludes masked responses
    "ptx={data: owner/texts, max_tokens: 8, sequences_per_mini_batch: 2, coef: 0.5, mode: deepspeed}",
]


def _one_step(rank: int, port: int, model: Path, out: Path) -> Any:
    """An optimizer step that takes texts along; then the reference follows, and everything is exported."""
    worker = worker_of(rank, OVERRIDES, port, model)
    layout = load("configs/debug/ppo.yaml", OVERRIDES).layout("actor")
    everything, texts = samples(), on_all_tokens(samples())
    passes = inference_schedule(everything, layout, 40).ranks[0]
    request = ForwardRequest(schedule=passes, chunks=chunks())
    columns = experience(everywhere(worker.logprobs("actor", request)))
    with pytest.raises(RuntimeError, match="optimizer state has no memory"):
        worker._roles["actor"].require_state()
    own, along = under_one_length(
        step_schedule([everything[i] for i in STEPS[0]], layout, 40),
        step_schedule([texts[i] for i in TEXTS[0]], layout, 40),
    )
    batch = UpdateRequest(schedules=[along.ranks[0]], chunks=chunks())
    request = UpdateRequest(schedules=[own.ranks[0]], chunks=columns, kl_coef=0.1, texts=batch)
    told = worker.update("actor", request)
    worker.soft_update_reference("actor")
    worker.offload_all()
    for name, average in (("actor", False), ("average", True), ("again", False)):
        worker.swap_weights("actor", average)
        worker.export("actor", str(out / name), str(model), str(model))
    worker.export("reference", str(out / "reference"), str(model), str(model))
    worker.close()
    return told


@pytest.mark.dist
def test_a_step_with_pretraining_texts_ema_and_reference_sync(pool: RankPool, tmp_path: Path) -> None:
    model, out = save_model(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    ranks = pool.run(_one_step, free_port(), model, out, world_size=4, connected=False)
    (told,) = [result[0] for result in ranks if result is not None]
    assert told["loss/total"] == pytest.approx((told["policy/loss"] + 0.5 * told["loss/ptx"]) / 2)
    assert {"policy/ratio_mean", "policy/ratio_var", "policy/ratio_max", "policy/ratio_min", "policy/lr"} <= told.keys()
    start, actor, average, reference = (
        state_of(at) for at in (model, out / "actor", out / "average", out / "reference")
    )
    assert max((actor[name] - start[name]).abs().max() for name in start) > 1e-5
    for name, again in state_of(out / "again").items():
        assert torch.equal(again, actor[name]), name
        torch.testing.assert_close(average[name], 0.75 * start[name] + 0.25 * actor[name], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(reference[name], 0.4 * start[name] + 0.6 * actor[name], rtol=1e-6, atol=1e-7)


def _exported(rank: int, port: int, model: Path, overrides: list[str], role: str, out: Path) -> None:
    worker = worker_of(rank, overrides, port, model)
    worker.export(role, str(out), str(model), str(model))
    worker.close()


@pytest.mark.dist
def test_a_critic_keeps_the_head_of_a_reward_model_or_gets_a_new_one(pool: RankPool, tmp_path: Path) -> None:
    model, other = save_model(tmp_path / "model"), save_model(tmp_path / "other", seed=1)

    def exported(model: Path, role: str, name: str, *overrides: str) -> dict[str, torch.Tensor]:
        args = free_port(), model, list(overrides), role, tmp_path / name
        pool.run(_exported, *args, world_size=4, connected=False)
        return state_of(tmp_path / name)

    reward = exported(other, "reward", "reward")
    assert reward["score.weight"].std() > 0
    path = f"critic.path={tmp_path / 'reward'}"
    loaded, new = (
        exported(model, "critic", "loaded", path, "critic.head=loaded"),
        exported(model, "critic", "new", path),
    )
    assert all(torch.equal(loaded[name], values) for name, values in reward.items())
    for name, values in reward.items():
        expected = torch.zeros_like(values) if name == "score.weight" else values
        assert torch.equal(new[name], expected), name


@pytest.mark.dist
@pytest.mark.parametrize(
    ("config", "untrained"),
    [
        (qwen3_5_whole_config(), "model.visual.merger.norm.weight"),
        (glm4_moe_config(num_nextn_predict_layers=1), "model.layers.4.eh_proj.weight"),
    ],
    ids=["vision", "mtp"],
)
def test_exports_have_the_tensors_that_are_not_trained(
    pool: RankPool, tmp_path: Path, config: dict[str, Any], untrained: str
) -> None:
    model = tmp_path / "model"
    start = make_directory(model, config, tensors={**random_tensors(model_spec(config)), untrained: torch.randn(8, 6)})
    for role, head in (("actor", set[str]()), ("critic", {"score.weight"})):
        pool.run(_exported, free_port(), model, [], role, tmp_path / role, world_size=4, connected=False)
        exported = state_of(tmp_path / role)
        assert untrained in exported
        for name in exported.keys() - head:
            assert torch.equal(exported[name], start[name]), name
