"""Comparison of a trained role with the steps and the weights of the naive program in tests/oracle."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.data.packing import Chunks, TokenChunk, scatter
from megarl.types import Ragged, RankSchedule, SampleInfo
from tests.oracle import adam, models, ppo

if TYPE_CHECKING:
    from megarl.megatron.model_engine import ModelEngine

GRADIENT_STEP = Optimizer(lr=1e6, eps=1e6, clip_grad=None)
"""Steps that move the weights by their gradients, with Adam's rate and epsilon of this size and without clipping."""


def adam_of(settings: Optimizer) -> adam.AdamSettings:
    """The same optimizer, for the oracle, which has a constant learning rate alone."""
    assert settings.schedule == "constant"
    assert settings.warmup == 0
    same = ("lr", "betas", "eps", "weight_decay", "clip_grad")
    return adam.AdamSettings(**{name: getattr(settings, name) for name in same})


def kept_of(chunk: Any, row: int) -> list[list[int]] | None:
    """The ids of which each token of a row was sampled; None where they are not recorded."""
    if chunk.kept_counts is None:
        return None
    ends = np.cumsum(chunk.kept_counts[row])[:-1]
    return [ids.tolist() for ids in np.split(chunk.kept_ids[row], ends)]


def samples_of(chunks: list[Any], infos: list[SampleInfo], **fields: Any) -> list[models.Sample]:
    """The rows of chunks, for the oracle.

    Args:
        fields: of each sample, functions of its info.
    """
    return [
        models.Sample(
            sample_id=info.sample_id,
            prompt_ids=chunks[info.chunk].prompt_ids[info.row].tolist(),
            response_ids=chunks[info.chunk].response_ids[info.row].tolist(),
            finished=info.finished,
            loss_mask=None if chunks[info.chunk].loss_mask is None else chunks[info.chunk].loss_mask[info.row].tolist(),
            kept=kept_of(chunks[info.chunk], info.row),
            **{name: of(info) for name, of in fields.items()},
        )
        for info in infos
    ]


def state_of(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face directory, by name."""
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def logprobs_by_chunk(
    engine: ModelEngine, schedule: RankSchedule, chunks: Chunks[TokenChunk], temperature: float
) -> dict[int, Ragged] | None:
    """Returns what the ranks of the last stage report, as their worker does."""
    from megarl.megatron.model_engine import rows_of

    flat = engine.logprobs(schedule, chunks, temperature)
    return None if flat is None else scatter(rows_of(schedule), flat)


def everywhere(column: dict[int, Any] | None) -> dict[int, Any]:
    """The values of a column on all ranks, by chunk; collective."""
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, column)
    return {chunk: rows for part in parts if part for chunk, rows in part.items()}


def reductions_over(group: Any = None) -> list[Any]:
    """The sum and the largest of vectors over the ranks, as the experience takes them."""
    import torch.distributed as dist

    def reduce(vector: torch.Tensor, operation: Any) -> torch.Tensor:
        dist.all_reduce(vector, op=operation, group=group)
        return vector

    return [partial(reduce, operation=operation) for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)]


def weights_of(role: Any) -> dict[str, torch.Tensor]:
    """Copies of a rank's parameters, with those of adapters."""
    parameters = {**role.model.parameters(), **role.model.adapters()}
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def shards_of(role: Any, tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, Any, torch.Tensor]]:
    """The parts of HF's tensors that tensors of the parameters' shapes hold: name, region and values."""
    parts = [(shard, tensors[shard.param][shard.box.slices]) for shard in role.saved_map(role.rank).shards]
    return [(shard.name, shard.region.slices, part.mT if shard.transposed else part) for shard, part in parts]


def trained(role: Any, steps: list[dict[str, float]]) -> dict[str, Any]:
    """A rank's result for the checks below: its steps, and its shards of the weights by HF name."""
    shards = shards_of(role, weights_of(role))
    return {"name": role.name, "steps": steps, "reports": role.reports, "shards": shards}


def check(
    ranks: list[dict[str, Any]],
    steps: list[ppo.Step],
    model: Any,
    start: dict[str, torch.Tensor],
) -> None:
    """All ranks of a role against the oracle.

    Args:
        ranks: of ``trained``.
        steps, model: of the oracle.
        start: the weights before the update, by HF name.
    """
    with TemporaryDirectory() as stored:
        model.save_pretrained(stored)  # in memory, the experts of a layer are one tensor
        check_against(ranks, steps, state_of(Path(stored)), start)


def check_against(
    ranks: list[dict[str, Any]],
    steps: list[ppo.Step],
    weights: dict[str, torch.Tensor],
    start: dict[str, torch.Tensor],
) -> None:
    """The same, with the oracle's weights after the update."""
    for rank in ranks:
        _check_steps(rank, steps)
    _check_weights(ranks[0]["name"], [rank["shards"] for rank in ranks], weights, start)


def _check_steps(found: dict[str, Any], steps: list[ppo.Step]) -> None:
    assert len(found["steps"]) == len(steps)
    for got, want in zip(found["steps"], steps, strict=True):
        assert got["grad_norm"] == pytest.approx(want.grad_norm, rel=1e-5)
        assert got["skipped"] == 0.0
        if found["reports"]:
            # The advantages of a step have mean 0, so the terms of a policy's loss cancel. What is left has the
            # rounding of their ratios, which is that of log-probabilities of about 10 nats: 1e-6.
            assert got["loss"] == pytest.approx(want.loss, rel=1e-5, abs=1e-6)
            for metric, value in want.metrics.items():
                mean = got[metric] if metric in got else got[f"{metric}_mean"]
                # Squares and differences of log-probabilities that are near each other: the same, relative to less.
                assert mean == pytest.approx(value, rel=1e-4, abs=1e-6), metric


def _check_weights(name: str, ranks: list[Any], want: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> None:
    """Every replica of every shard, against how far the parameter moved."""
    seen = set()
    for shards in ranks:
        for tensor, region, value in shards:
            expected = want[tensor][region]
            moved = (expected - start[tensor][region]).abs().max().item()
            worst = (value - expected).abs().max().item()
            # A gradient is the same to 1e-5; in the worst element, where it is small, Adam's quotient magnifies that.
            # The bias of keys, which a softmax does not see, has rounding for a gradient.
            assert worst <= 1e-3 * moved + 2e-6, (
                f"{name} {tensor}{region} is off by {worst:.2e}; it moved by {moved:.2e}"
            )
            seen.add(tensor)
    assert seen == set(want), f"{name}: {sorted(seen ^ set(want))}"


def check_gradients(
    ranks: list[dict[str, Any]], weights: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> None:
    """All ranks of a role after a ``GRADIENT_STEP`` against the oracle's weights after it."""
    seen = set()
    for rank in ranks:
        for tensor, region, value in rank["shards"]:
            expected = weights[tensor][region]
            gradient = (expected - start[tensor][region]).abs().max().item()
            worst = (value - expected).abs().max().item()
            # PEFT's own gradients in float32 and in float64 differ by 4e-6 of the largest. Weights are rounded by 6e-8.
            assert worst <= 1e-5 * gradient + 6e-8, f"{tensor}{region} is off by {worst:.2e} of {gradient:.2e}"
            seen.add(tensor)
    assert seen == set(weights)
