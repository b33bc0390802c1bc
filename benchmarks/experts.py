"""Grouped experts against Megatron's loop over experts: CPU time, and the kernels that a GPU would start.

    python -m benchmarks.experts [--rounds 5] [--largest 128]

The first table is of the experts alone, the second of a whole Qwen3 mixture with four layers, heads of attention and
an output layer, whose experts are replaced by the loop, with the same weights. Times are the medians of the CPU times
of forward and backward passes on one thread, in turn. Kernels are operations of torch, but for views, in a
TorchDispatchMode: the program that counts those of a whole layer for a GPU (docs/gpu.md) counts them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megarl.data.packing import PackShape
from megarl.megatron.platform import start_platform
from megarl.megatron.staging import to_device
from megarl.types import Layout

HIDDEN, CHANNELS = 128, 64
CASES = ((8, 2, 2048), (64, 8, 2048), (128, 8, 2048), (128, 8, 256))
"""Experts, experts of a token, tokens."""
Case = tuple[int, int, int, torch.dtype]
"""The same, and a dtype."""
LAYERS = 4
SEQUENCE = 128
MIXTURE: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 1000,
    "hidden_size": HIDDEN,
    "intermediate_size": 384,
    "moe_intermediate_size": CHANNELS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": SEQUENCE,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=128, help="the largest number of experts")
    options = parser.parse_args(arguments)
    start_platform("cpu")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    chosen_cases = cases(options.largest)
    compare_experts(chosen_cases, options.rounds)
    compare_models(chosen_cases, options.rounds)


def compare_experts(chosen_cases: Sequence[Case], rounds: int) -> None:
    """Prints the times and kernels of the experts alone."""
    print("experts  of a token  tokens  dtype     loop ms  grouped ms  ratio  kernels of the loop  grouped")
    for case in chosen_cases:
        experts, chosen, tokens, dtype = case
        work = routed(experts, chosen, tokens, dtype)
        passes: list[Callable[[], torch.Tensor]] = []
        kernels: list[int] = []
        for module in modules(experts, dtype):
            forward = partial(outputs, module, work)
            passes.append(forward)
            kernels.append(started_kernels(forward, [*module.parameters(), *work]))
        loop, grouped = passes
        torch.testing.assert_close(grouped(), loop())
        times = milliseconds(passes, rounds)
        ratio = times[0] / times[1]
        print(
            shown(case),
            f"{times[0]:7.1f}",
            f"{times[1]:10.1f}",
            f"{ratio:5.2f}",
            f"{kernels[0]:19}",
            f"{kernels[1]:7}",
            sep="  ",
        )


def compare_models(chosen_cases: Sequence[Case], rounds: int) -> None:
    """Prints the speeds of whole models, and the kernels of a layer."""
    print("\nwhole model                               tokens/s of CPU time           kernels of a layer")
    print("experts  of a token  tokens  dtype        loop   grouped  ratio        loop   grouped")
    for case in chosen_cases:
        experts, chosen, tokens, dtype = case
        passes: list[Callable[[], torch.Tensor]] = []
        for model in models(experts, chosen, dtype, LAYERS):
            passes.append(partial(loss, model, tokens))
        loop, grouped = passes
        torch.testing.assert_close(grouped(), loop(), rtol=1e-3, atol=0)
        times = milliseconds(passes, rounds)
        ratio = times[0] / times[1]
        kernels = kernels_of_a_layer(experts, chosen, tokens, dtype)
        print(
            shown(case),
            f"{1000 * tokens / times[0]:8.0f}",
            f"{1000 * tokens / times[1]:8.0f}",
            f"{ratio:5.2f}",
            f"{kernels[0]:10.0f}",
            f"{kernels[1]:8.0f}",
            sep="  ",
            flush=True,
        )


def shown(case: Case) -> str:
    """Returns the first columns of a case's row."""
    experts, chosen, tokens, dtype = case
    name = str(dtype).removeprefix("torch.")
    return f"{experts:7}  {chosen:10}  {tokens:6}  {name:8}"


def cases(largest: int) -> list[Case]:
    """Returns the cases with few enough experts, in each dtype."""
    found: list[Case] = []
    for case in CASES:
        if case[0] <= largest:
            found.append((*case, torch.float32))
            found.append((*case, torch.bfloat16))
    return found


def modules(
    experts: int, dtype: torch.dtype, hidden: int = HIDDEN, channels: int = CHANNELS, *, fused: bool = False
) -> tuple[Any, Any]:
    """Returns Megatron's experts and ours, with the same weights."""
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
    grouped = GroupedExperts(experts, config, groups)
    torch.manual_seed(0)
    with torch.no_grad():
        for linear in (grouped.linear_fc1, grouped.linear_fc2):
            linear.weight.normal_(0, 0.1)
    return loop_of(grouped, config, groups), grouped


def loop_of(grouped: Any, config: Any, groups: Any) -> Any:
    """Returns Megatron's experts with the weights of ours."""
    from megatron.core.models.backends import LocalSpecProvider

    experts = len(grouped.linear_fc1.weight)
    loop: Any = LocalSpecProvider().grouped_mlp_modules(False)(experts, config, pg_collection=groups)
    with torch.no_grad():
        for linear in ("linear_fc1", "linear_fc2"):
            for expert, values in zip(loop.local_experts, getattr(grouped, linear).weight, strict=True):
                getattr(expert, linear).weight.copy_(values)
    return loop


def models(experts: int, chosen: int, dtype: torch.dtype, layers: int) -> tuple[Any, Any]:
    """Returns a mixture with Megatron's experts and one with ours, with the same weights."""
    from megarl.megatron.model import build_model
    from megarl.megatron.parallel import GroupCache, build_groups
    from megarl.models import model_spec

    sizes = {"num_experts": experts, "num_experts_per_tok": chosen, "num_hidden_layers": layers}
    spec = model_spec({**MIXTURE, **sizes, "dtype": str(dtype).removeprefix("torch.")})
    groups = build_groups(Layout(), 0, GroupCache())
    made: list[Any] = []
    for _ in range(2):
        model = build_model(spec, Layout(), groups, head="lm", dtype=dtype, trainable=True)
        torch.manual_seed(0)
        for name, parameter in model.parameters().items():
            is_norm = name.endswith("norm.weight")
            parameter.data.normal_(1.0 if is_norm else 0.0, 0.05)
        made.append(model.chunks[0])
    loop, grouped = made
    for layer in loop.decoder.layers:
        layer.mlp.experts = loop_of(layer.mlp.experts, loop.config, groups)
    return loop, grouped


def routed(experts: int, chosen: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Returns tokens in the order of their experts, which some have more of than others, as a router sends them."""
    random = torch.Generator().manual_seed(1)
    shares = torch.rand(experts, generator=random)
    places = torch.multinomial(shares, tokens * chosen, replacement=True, generator=random)
    hidden = torch.randn(tokens * chosen, HIDDEN, generator=random).to(dtype).requires_grad_()
    weights = torch.rand(tokens * chosen, generator=random).requires_grad_()
    return hidden, places.bincount(minlength=experts), weights


def outputs(module: Any, work: Sequence[torch.Tensor]) -> torch.Tensor:
    return module(*work)[0]


def loss(model: Any, tokens: int) -> torch.Tensor:
    """Returns the loss of the next token on sequences of random ids, packed."""
    from megarl.megatron.attention import PackParams, pack_arrays

    shape = PackShape(cu_seqlens=np.arange(0, tokens + 1, SEQUENCE, dtype=np.int32), max_seqlen=SEQUENCE)
    ids = np.random.default_rng(0).integers(MIXTURE["vocab_size"], size=tokens)
    arrays = to_device({"ids": ids, "labels": np.roll(ids, -1), **pack_arrays(shape)}, torch.device("cpu"))
    pack = PackParams.of(shape, arrays)
    hidden = model(arrays["ids"][None], None, None, packed_seq_params=pack, output_processor=_hidden_states)
    return F.cross_entropy(F.linear(hidden[:, 0], model.output_weight()), arrays["labels"])


def _hidden_states(*, hidden_states: torch.Tensor, **_unused: Any) -> torch.Tensor:
    return hidden_states


def milliseconds(forward: Sequence[Callable[[], torch.Tensor]], rounds: int) -> list[float]:
    """Returns the median CPU times of forward and backward passes, which take turns."""
    times: list[list[float]] = [[] for _ in forward]
    for _ in range(rounds):
        for run, taken in zip(forward, times, strict=True):
            start = process_time()
            run().sum().backward()
            taken.append(1000 * (process_time() - start))
    return [median(taken) for taken in times]


def started_kernels(forward: Callable[[], torch.Tensor], on_device: Sequence[torch.Tensor]) -> int:
    """Returns the number of kernels of a forward and a backward pass; the tensors are on the device."""
    from tests.megatron.host_waits import counting

    with counting(on_device) as counter:
        forward().sum().backward()
    counts = counter.counts
    return sum(sum(names.values()) for table in (counts.kernels, counts.products) for names in table.values())


def kernels_of_a_layer(experts: int, chosen: int, tokens: int, dtype: torch.dtype) -> list[int]:
    """Returns what a second layer adds to a model with the loop, and to one with grouped experts."""
    found: list[list[int]] = []
    for layers in (1, 2):
        pair = models(experts, chosen, dtype, layers)
        found.append([started_kernels(partial(loss, each, tokens), [*each.parameters()]) for each in pair])
    one, two = found
    return [more - fewer for fewer, more in zip(one, two, strict=True)]


if __name__ == "__main__":
    main(sys.argv[1:])
