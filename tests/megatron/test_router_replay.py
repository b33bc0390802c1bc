"""Tokens that go to recorded experts, against transformers with routers that do the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.types import Layout, Ragged, RolloutChunk
from tests.megatron.compare import logprobs_by_chunk
from tests.megatron.families import MIXTURES
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role
from tests.pool import RankPool

SP2 = Layout(tp=2, pp=2, sequence_parallel=True)
NONE = 255


def routed_chunks(layers: int, experts: int, chosen: int) -> list[RolloutChunk]:
    """Random tokens with random experts; a third of the positions has none."""
    random = np.random.default_rng(0)
    made: list[RolloutChunk] = []
    for chunk in random_chunks()[0]:
        rows: list[Any] = []
        for prompt, response in zip(chunk.prompt_ids, chunk.response_ids, strict=True):
            positions = len(prompt) + len(response) - 1
            routes = random.random((positions, layers, experts)).argsort(-1)[..., :chosen].astype(np.uint8)
            routes[random.random(positions) < 1 / 3] = NONE
            rows.append(routes.reshape(-1))
        made.append(replace(chunk, routes=Ragged.from_rows(rows, np.uint8)))
    return made


def replayed(rank: int, directory: Path, layout: Layout, chunks: list[RolloutChunk], recompute: Any = "none") -> Any:
    """Log-probabilities; then a step of training: its metrics and the weights after it."""
    from megarl.data.schedule import inference_schedule, step_schedule
    from megarl.megatron.supervised_losses import text_loss

    infos = random_chunks()[1]
    role = load_role(directory, "actor", layout, rank, trainable=True, recompute=recompute, replays_routes=True)
    passes = inference_schedule(infos, layout, 40).ranks[role.coords.dp]
    found = logprobs_by_chunk(role, passes, chunks, 1.0)
    role.start_training(Optimizer(lr=1e-3, eps=1e-4), total_steps=1)
    update = step_schedule(infos, layout, 40).ranks[role.coords.dp]
    (metrics,) = role.update([update], chunks, partial(text_loss, role))
    weights = {name: parameter.detach().clone() for name, parameter in role.model.parameters().items()}
    return found, metrics, weights


def expected(directory: Path, chunks: list[RolloutChunk], chosen: int) -> dict[tuple[int, int], torch.Tensor]:
    """By chunk and row, from transformers' model with its routers' choice replaced."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    routers = [module for name, module in model.named_modules() if type(module).__name__.lower().endswith("topkrouter")]
    given: dict[int, torch.Tensor] = {}
    for index, router in enumerate(routers):
        router.forward = partial(_route, router, router.forward, given, index)
    found: dict[tuple[int, int], torch.Tensor] = {}
    for index, chunk in enumerate(chunks):
        assert chunk.routes is not None
        for row in range(len(chunk.sample_ids)):
            prompt, response = (torch.from_numpy(ids[row]).long() for ids in (chunk.prompt_ids, chunk.response_ids))
            routes = torch.from_numpy(chunk.routes[row]).long().reshape(-1, len(routers), chosen)
            last = torch.full((1, *routes.shape[1:]), NONE)
            for layer, experts in enumerate(torch.cat([routes, last]).unbind(1)):
                given[layer] = experts
            with torch.no_grad():
                logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            found[index, row] = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
    return found


def _route(router: Any, forward: Any, given: dict[int, torch.Tensor], index: int, hidden: torch.Tensor) -> Any:
    logits, _, own = forward(hidden)
    scores = logits.float().softmax(-1)
    if hasattr(router, "e_score_correction_bias"):
        scores = logits.float().sigmoid()
    experts = torch.where(given[index] == NONE, own, given[index])
    weights = scores.gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights * getattr(router, "routed_scaling_factor", 1.0), experts


CASES = {  # layers with experts, experts, experts of a token
    "mixtral": (5, 6, 2),
    "qwen3_moe": (5, 6, 3),
    "several_kinds": (3, 6, 3),
    "glm4_moe": (4, 6, 3),
    "deepseek_v3_groups": (3, 6, 4),  # of experts in groups
}


@pytest.mark.dist
@pytest.mark.parametrize("layout", [Layout(), SP2, Layout(dp=2, ep=2), Layout(pp=2, vpp=2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_recorded_experts_are_used(pool: RankPool, tmp_path: Path, name: str, layout: Layout) -> None:
    directory = MIXTURES[name].save(tmp_path)
    chunks = routed_chunks(*CASES[name])
    want = expected(directory, chunks, CASES[name][2])
    results = pool.run(replayed, directory, layout, chunks, world_size=layout.world_size)
    merged = {index: column for found, _, _ in results for index, column in (found or {}).items()}
    for (index, row), values in want.items():
        assert (torch.as_tensor(merged[index][row]) - values).abs().max() <= 1e-5
    assert all(0.5 < metrics["rerouted"] < 1 for _, metrics, _ in results)
    assert len({metrics["rerouted"] for _, metrics, _ in results}) == 1


@pytest.mark.dist
def test_recomputed_layers_use_them_again(pool: RankPool, tmp_path: Path) -> None:
    directory = MIXTURES["qwen3_moe"].save(tmp_path)
    chunks = routed_chunks(*CASES["qwen3_moe"])
    kept, full = (
        pool.run(replayed, directory, Layout(pp=2), chunks, recompute, world_size=2) for recompute in ("none", "full")
    )
    for (_, _, once), (_, _, again) in zip(kept, full, strict=True):
        for name, weights in once.items():
            torch.testing.assert_close(again[name], weights, rtol=0, atol=1e-7)
