"""Grouped experts against Megatron's loop over experts: CPU time, and the kernels that a GPU would start.

    python -m benchmarks.experts [--rounds 5] [--largest 128]

Times are of forward and backward passes of the experts alone, on one thread, side by side. Kernels are counted by the
program that counts those of a whole layer (docs/gpu.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F

from megarl.megatron.platform import start_platform
from megarl.types import Layout

HIDDEN, CHANNELS = 128, 64
CASES = ((8, 2, 2048), (64, 8, 2048), (128, 8, 2048), (128, 8, 256))
"""Experts, experts of a token, tokens."""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=128, help="the largest number of experts")
    options = parser.parse_args(arguments)
    start_platform("cpu")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    print("experts  of a token  tokens  dtype     loop ms  grouped ms  ratio  kernels of the loop  grouped")
    for experts, chosen, tokens in CASES:
        if experts > options.largest:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            loop, grouped = modules(experts, dtype)
            work = routed(experts, chosen, tokens, dtype)
            torch.testing.assert_close(grouped(*work)[0], loop(*work)[0])
            times = [milliseconds(module, work, options.rounds) for module in (loop, grouped)]
            kernels = [started_kernels(module, work) for module in (loop, grouped)]
            numbers = f"{times[0]:7.1f}  {times[1]:10.1f}  {times[0] / times[1]:5.2f}  {kernels[0]:19}  {kernels[1]:7}"
            print(f"{experts:7}  {chosen:10}  {tokens:6}  {str(dtype).removeprefix('torch.'):8}  {numbers}")


def modules(
    experts: int, dtype: torch.dtype, hidden: int = HIDDEN, channels: int = CHANNELS, *, fused: bool = False
) -> tuple[Any, Any]:
    """Returns Megatron's experts and ours, with the same weights."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.megatron.experts import GroupedExperts
    from megarl.megatron.parallel import GroupCache, build_groups

    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_ffn_hidden_size=channels,
        bias_activation_fusion=fused,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        params_dtype=dtype,
        perform_initialization=False,
    )
    groups = build_groups(Layout(), 0, GroupCache())
    loop: Any = LocalSpecProvider().grouped_mlp_modules(False)(experts, config, pg_collection=groups)
    grouped = GroupedExperts(experts, config, groups)
    torch.manual_seed(0)
    with torch.no_grad():
        for linear in ("linear_fc1", "linear_fc2"):
            weight = getattr(grouped, linear).weight.normal_(0, 0.1)
            for expert, values in zip(loop.local_experts, weight, strict=True):
                getattr(expert, linear).weight.copy_(values)
    return loop, grouped


def routed(experts: int, chosen: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Returns tokens in the order of their experts, which some have more of than others, as a router sends them."""
    random = torch.Generator().manual_seed(1)
    shares = torch.rand(experts, generator=random)
    places = torch.multinomial(shares, tokens * chosen, replacement=True, generator=random)
    hidden = torch.randn(tokens * chosen, HIDDEN, generator=random).to(dtype).requires_grad_()
    weights = torch.rand(tokens * chosen, generator=random).requires_grad_()
    return hidden, places.bincount(minlength=experts), weights


def milliseconds(module: Callable[..., Any], work: Sequence[torch.Tensor], rounds: int) -> float:
    """Returns the least CPU time of some rounds of forward and backward passes."""
    best = float("inf")
    for _ in range(rounds):
        start = process_time()
        module(*work)[0].sum().backward()
        best = min(best, process_time() - start)
    return 1000 * best


def started_kernels(module: Any, work: Sequence[torch.Tensor]) -> int:
    from tests.megatron.host_waits import counting

    with counting([*module.parameters(), *work]) as counter:
        module(*work)[0].sum().backward()
    counts = counter.counts
    return sum(sum(names.values()) for table in (counts.kernels, counts.products) for names in table.values())


if __name__ == "__main__":
    main(sys.argv[1:])
