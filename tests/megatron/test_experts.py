"""Grouped experts against Megatron's own, which are called one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.pool import RankPool

FEW = (3, 0, 5, 1)
"""Tokens of each expert."""


def differences(
    rank: int, counts: Sequence[int], hidden: int, channels: int, dtype: torch.dtype, fused: bool
) -> dict[str, float]:
    from benchmarks.experts import modules

    loop, grouped = modules(len(counts), dtype, hidden, channels, fused=fused)
    found: dict[str, list[torch.Tensor]] = {}
    for name, module in (("loop", loop), ("grouped", grouped)):
        random = torch.Generator().manual_seed(0)
        tokens = torch.randn(sum(counts), hidden, generator=random).to(dtype).requires_grad_()
        weights = torch.rand(sum(counts), generator=random).requires_grad_()
        output, _ = module(tokens, torch.tensor(counts), weights)
        output.float().square().sum().backward()
        found[name] = [output, tokens.grad, weights.grad]
    for linear in ("linear_fc1", "linear_fc2"):
        gradients = [getattr(expert, linear).weight.grad for expert in loop.local_experts]
        zeros = torch.zeros_like(getattr(grouped, linear).weight[0])
        found["loop"].append(torch.stack([zeros if gradient is None else gradient for gradient in gradients]))
        found["grouped"].append(getattr(grouped, linear).weight.grad)
    names = ("output", "tokens", "weights", "linear_fc1", "linear_fc2")
    pairs = zip(names, found["grouped"], found["loop"], strict=True)
    return {name: float((ours - theirs).detach().abs().max()) if ours.numel() else 0.0 for name, ours, theirs in pairs}


@pytest.mark.dist
@pytest.mark.parametrize("fused", [False, True], ids=["reference", "fused"])
@pytest.mark.parametrize(
    ("counts", "hidden", "channels"), [(FEW, 16, 12), (FEW, 10, 7), ((0, 0, 0, 0), 16, 12), ((0, 4), 10, 7)]
)
def test_outputs_and_gradients_are_those_of_megatron(
    pool: RankPool, counts: Sequence[int], hidden: int, channels: int, fused: bool
) -> None:
    (found,) = pool.run(differences, counts, hidden, channels, torch.float32, fused, world_size=1)
    assert max(found.values()) < 1e-5, found
