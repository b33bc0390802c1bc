"""Grouped experts against Megatron's own, which are called one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megarl.types import Layout
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


def clamped_experts(experts: int, channels: int, dtype: torch.dtype) -> Any:
    """gpt-oss' experts, of hidden size 16, unset."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.megatron.experts import GroupedExperts, quick_gelu
    from megarl.megatron.parallel import GroupCache, build_groups

    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_ffn_hidden_size=channels,
        gated_linear_unit=True,
        activation_func=quick_gelu,
        activation_func_clamp_value=7.0,
        glu_linear_offset=1.0,
        add_bias_linear=True,
        params_dtype=dtype,
        perform_initialization=False,
    )
    return GroupedExperts(experts, config, build_groups(Layout(), 0, GroupCache()))


def clamped_differences(rank: int) -> dict[str, float]:
    """Of gpt-oss' experts against those of transformers, with inputs so large that many products are clamped."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    torch.manual_seed(0)
    theirs = GptOssExperts(GptOssConfig(hidden_size=16, intermediate_size=12, num_local_experts=len(FEW)))
    ours = clamped_experts(len(FEW), 12, torch.float32)
    pairs = {
        "gate_up_proj": ours.linear_fc1.weight,
        "gate_up_proj_bias": ours.linear_fc1.bias,
        "down_proj": ours.linear_fc2.weight,
        "down_proj_bias": ours.linear_fc2.bias,
    }
    with torch.no_grad():
        for name, parameter in pairs.items():
            values = getattr(theirs, name).normal_()
            parameter.copy_(values.mT if name.endswith("proj") else values)
    tokens = 4 * torch.randn(sum(FEW), 16)
    weights = torch.rand(sum(FEW))
    experts = torch.arange(len(FEW)).repeat_interleave(torch.tensor(FEW))
    one, other = tokens.clone().requires_grad_(), tokens.clone().requires_grad_()
    outputs = [ours(one, torch.tensor(FEW), weights)[0], theirs(other, experts[:, None], weights[:, None])]
    for output in outputs:
        output.square().sum().backward()
    products = tokens @ theirs.gate_up_proj.detach()[0]
    assert (products > 7).float().mean() > 0.2, "some are clamped"
    found = {"output": outputs[0] - outputs[1], "tokens": (one.grad - other.grad) / other.grad.abs().max()}
    for name, parameter in pairs.items():
        gradient = getattr(theirs, name).grad
        own = parameter.grad.mT if name.endswith("proj") else parameter.grad
        found[name] = (own - gradient) / gradient.abs().max()
    return {name: float(difference.detach().abs().max()) for name, difference in found.items()}


def bias_gradients(rank: int, tokens: int) -> dict[str, tuple[float, float]]:
    """Of an expert's biases in bfloat16, with all tokens alike: what the first token alone gives, and all of them."""
    experts = clamped_experts(2, 16, torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.constant_(parameter, 0.125)
    found: dict[str, list[float]] = {"fc1": [], "fc2": []}
    for count in (1, tokens):
        experts.zero_grad()
        inputs = torch.ones(count, 16, dtype=torch.bfloat16)
        output, _ = experts(inputs, torch.tensor([count, 0]), torch.ones(count))
        output.sum().backward()
        for name, linear in (("fc1", experts.linear_fc1), ("fc2", experts.linear_fc2)):
            found[name].append(float(linear.bias.grad[0, 0]))
    return {name: (one, every) for name, (one, every) in found.items()}


@pytest.mark.dist
def test_gradients_of_biases_in_bfloat16_are_sums_over_all_tokens(pool: RankPool) -> None:
    """Beyond 256 equal parts, a sum in bfloat16 stands still."""
    (found,) = pool.run(bias_gradients, 2048, world_size=1)
    for one, every in found.values():
        assert every == pytest.approx(2048 * one, rel=0.01)


@pytest.mark.dist
def test_clamped_experts_with_biases_are_those_of_transformers(pool: RankPool) -> None:
    (found,) = pool.run(clamped_differences, world_size=1)
    assert max(found.values()) < 1e-4, found
