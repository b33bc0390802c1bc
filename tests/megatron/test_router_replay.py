"""Tokens that go to recorded experts, against transformers with routers that do the same."""

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

from megarl.types import Layout, Ragged, RolloutChunk
from tests.megatron.compare import adam_of, check, logprobs_by_chunk, samples_of, state_of, trained
from tests.megatron.families import MIXTURES
from tests.megatron.samples import random_chunks
from tests.megatron.supervised import SETTINGS
from tests.megatron.tiny import load_role
from tests.oracle import models, supervised
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
    """Log-probabilities; then a step of training, for `check`."""
    from megarl.data.schedule import inference_schedule, step_schedule
    from megarl.megatron.supervised_losses import text_loss

    infos = random_chunks()[1]
    role = load_role(directory, "actor", layout, rank, trainable=True, recompute=recompute, replays_routes=True)
    passes = inference_schedule(infos, layout, 40).ranks[role.coords.dp]
    found = logprobs_by_chunk(role, passes, chunks, 1.0)
    role.start_training(SETTINGS, total_steps=1)
    update = step_schedule(infos, layout, 40).ranks[role.coords.dp]
    return found, trained(role, role.update([update], chunks, partial(text_loss, role)))


def naive_model(directory: Path, chunks: list[RolloutChunk], chosen: int) -> torch.nn.Module:
    """Transformers' model, whose routers' choice is replaced by the recorded one of the sequence that it reads."""
    model = models.causal_lm(json.loads((directory / "config.json").read_text()), state_of(directory))
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    for router in routers:
        router.forward = partial(_route, router)
    recorded: dict[tuple[int, ...], torch.Tensor] = {}
    for chunk in chunks:
        assert chunk.routes is not None
        for prompt, response, row in zip(chunk.prompt_ids, chunk.response_ids, chunk.routes, strict=True):
            routes = torch.from_numpy(row).long().reshape(-1, len(routers), chosen)
            last = torch.full((1, *routes.shape[1:]), NONE)
            recorded[*prompt.tolist(), *response.tolist()] = torch.cat([routes, last])
    model.register_forward_pre_hook(partial(_choose, recorded), with_kwargs=True)
    return model


def _choose(recorded: dict[tuple[int, ...], torch.Tensor], model: Any, _: Any, inputs: dict[str, Any]) -> None:
    experts = recorded[tuple(inputs["input_ids"][0].tolist())]
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    for router, given in zip(routers, experts.unbind(1), strict=True):
        router.given = given


def _route(router: Any, hidden: torch.Tensor) -> Any:
    logits, _, own = type(router).forward(router, hidden)
    scores = logits.float().softmax(-1)
    if hasattr(router, "e_score_correction_bias"):
        scores = logits.float().sigmoid()
    experts = torch.where(router.given == NONE, own, router.given)
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """By name: a model, its chunks, and of the naive model the log-probabilities and a step of training."""

    @cache
    def make(name: str) -> Any:
        directory = MIXTURES[name].save(tmp_path_factory.mktemp(name))
        chunks = routed_chunks(*CASES[name])
        model = naive_model(directory, chunks, CASES[name][2])
        infos = random_chunks()[1]
        samples = samples_of(chunks, infos)
        with torch.no_grad():
            rows = [models.token_statistics(model, sample, 1.0)[0] for sample in samples]
        logprobs = {(info.chunk, info.row): row for info, row in zip(infos, rows, strict=True)}
        return directory, chunks, logprobs, supervised.fine_tune(model, [samples], adam_of(SETTINGS))

    return make


@pytest.mark.dist
@pytest.mark.parametrize("layout", [Layout(), SP2, Layout(dp=2, ep=2), Layout(pp=2, vpp=2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_recorded_experts_are_used(pool: RankPool, made: Callable[[str], Any], name: str, layout: Layout) -> None:
    """The log-probabilities, the loss, the gradient's norm and the updated weights are the naive ones."""
    directory, chunks, logprobs, (steps, model) = made(name)
    results = pool.run(replayed, directory, layout, chunks, world_size=layout.world_size)
    merged = {index: column for found, _ in results for index, column in (found or {}).items()}
    for (index, row), values in logprobs.items():
        assert (torch.as_tensor(merged[index][row]) - values).abs().max() <= 1e-5
    check([rank for _, rank in results], steps, model, state_of(directory))
    (rerouted,) = {rank["steps"][0]["rerouted"] for _, rank in results}
    assert 0.5 < rerouted < 1


@pytest.mark.dist
def test_recomputed_layers_use_them_again(pool: RankPool, made: Callable[[str], Any]) -> None:
    directory, chunks, _, (steps, model) = made("qwen3_moe")
    results = pool.run(replayed, directory, Layout(pp=2), chunks, "full", world_size=2)
    check([rank for _, rank in results], steps, model, state_of(directory))
