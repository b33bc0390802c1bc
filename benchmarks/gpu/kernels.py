"""Times each part of a pass op by op and fused, forward and backward.

Also products and a copy, whose speeds bound what an update can reach (`roofline`).
``megarl/megatron/platform/kernels.py`` has what was found. Without a GPU, Triton's interpreter runs
its kernels, whose times then say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.work import SIZES, Size
from megarl.megatron.platform import start_platform

_ROPE_BASE = 1e6
EPS = 1e-6
"""Of the norms."""
TEMPERATURE = 0.9
"""Of the log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A part's two implementations, functions of the inputs that return a tensor or a tuple of them."""

    kernel: str
    reference: Callable[..., Any]
    fused: Callable[..., Any]
    inputs: tuple[Tensor, ...]

    def run(self, function: Callable[..., Any], gradients: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Returns the results, then the gradients of the inputs that have any.

        Args:
            gradients: of the results; random ones by default.
        """
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in self.inputs]
        results = function(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, gradients or random_like(results))
        return [*(y.detach() for y in results), *(x.grad for x in leaves if x.grad is not None)]


def random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the same tensors for the same shapes and dtypes."""
    generator = torch.Generator(tensors[0].device).manual_seed(1)
    return [torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in tensors]


class _OneRank:
    """A group of one TP rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def swiglu(x: Tensor) -> Tensor:
    """As Megatron's MLP computes it op by op."""
    gate, linear = x.chunk(2, dim=-1)
    return F.silu(gate) * (linear + 0.0)


def cases(size: Size, dtype: torch.dtype, device: str, tokens: int) -> Iterator[Case]:
    """Yields every kernel, for the shapes of one layer, or of one chunk of logits."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
    from megatron.core.models.common.embeddings import rope_utils

    from megarl.megatron.logprobs import logprobs_and_entropy, vocab_shard
    from megarl.megatron.model import rms_norm
    from megarl.megatron.platform.kernels import compiled
    from megarl.role_specs import logit_chunk

    torch.manual_seed(0)

    def random(*shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(*shape, device=device)).to(dtype).requires_grad_()

    def swiglu_fused(x: Tensor) -> Any:
        return bias_swiglu_impl(x, None)

    def norm_by_op(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, EPS)

    def norm_fused(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, EPS)

    yield Case(
        kernel="norms",
        reference=norm_by_op,
        fused=norm_fused,
        inputs=(random(tokens, 1, size.hidden), random(size.hidden)),
    )
    yield Case(kernel="activation", reference=swiglu, fused=swiglu_fused, inputs=(random(tokens, 1, 2 * size.ffn),))
    width = size.head_dim
    rates = _ROPE_BASE ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(tokens, device=device)[:, None] * rates
    rope = rope_utils._apply_rotary_pos_emb_bshd
    yield Case(
        kernel="rope",
        reference=rope,
        fused=compiled(rope),
        inputs=(random(tokens, 1, size.heads, width), torch.cat([angles, angles], -1)[:, None, None]),
    )
    shard: Any = vocab_shard(_OneRank(), size.vocab, size.vocab)  # pyright: ignore[reportArgumentType]
    labels = torch.randint(size.vocab, (tokens,), device=device)

    def logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, *, fused: bool) -> Any:
        options = {"temperature": TEMPERATURE, "chunk_tokens": logit_chunk(fused), "fused": fused}
        return logprobs_and_entropy(hidden, weight, labels, shard, **options)

    yield Case(
        kernel="logprobs",
        reference=partial(logprobs, fused=False),
        fused=partial(logprobs, fused=True),
        inputs=(random(tokens, size.hidden), random(size.vocab, size.hidden, std=size.hidden**-0.5), labels),
    )


def milliseconds(case: Case, function: Callable[..., Any], repeats: int) -> float:
    """The median time of a forward and a backward pass, after three that compile."""
    wait = torch.cuda.synchronize if case.inputs[0].is_cuda else (lambda: None)
    results = case.run(function)
    gradients = random_like(results[: len(results) - sum(x.requires_grad for x in case.inputs)])
    times: list[float] = []
    for _ in range(2 + repeats):
        wait()
        start = time.perf_counter()
        case.run(function, gradients)
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times[2:])


def measure(size: Size, device: str, *, tokens: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Returns by part the milliseconds of both implementations and the faster one."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases(size, getattr(torch, size.dtype), device, tokens):
        reference = milliseconds(case, case.reference, repeats)
        fused = milliseconds(case, case.fused, repeats)
        better = "fused" if fused < reference else "reference"
        found[case.kernel] = {"reference_ms": reference, "fused_ms": fused, "better": better}
        print(f"{case.kernel:12} reference {reference:9.3f} ms   fused {fused:9.3f} ms   {better}", flush=True)
    return found


def copy_speed(device: str, nbytes: int, repeats: int) -> float:
    """The bytes that a copy on the device writes, GB per second; what a sync can be compared with."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return nbytes / _seconds(partial(target.copy_, source), device, repeats) / 1e9


def product_speed(size: Size, device: str, *, tokens: int, repeats: int) -> float:
    """The TFLOP/s of the products of a layer and of the output layer, forward."""
    dtype = getattr(torch, size.dtype)
    queries = size.heads * size.head_dim
    projected = queries + 2 * size.kv_heads * size.head_dim
    shapes = [(size.hidden, projected), (queries, size.hidden), (size.hidden, 2 * size.ffn), (size.ffn, size.hidden)]
    counts = [*(size.layers for _ in shapes), 1]
    operations = seconds = 0.0
    for count, (inner, outer) in zip(counts, [*shapes, (size.hidden, size.vocab)], strict=True):
        values = torch.randn(tokens, inner, device=device, dtype=dtype)
        weight = torch.randn(outer, inner, device=device, dtype=dtype)
        operations += count * 2.0 * tokens * inner * outer
        seconds += count * _seconds(partial(F.linear, values, weight), device, repeats)
    return operations / seconds / 1e12


def _seconds(function: Callable[[], Any], device: str, repeats: int) -> float:
    """The median time of a call, after a first one."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times: list[float] = []
    for _ in range(1 + repeats):
        wait()
        start = time.perf_counter()
        function()
        wait()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels", description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("out", type=Path)
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = 8192
    if device == "cpu":
        tokens = 64
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    start_platform(device)
    found: dict[str, Any] = {"copy/gb_per_second": copy_speed(device, 1 << 30 if device == "cuda" else 1 << 20, 20)}
    for name in [name for name in SIZES if (name == "tiny") is (device == "cpu")]:
        speed = product_speed(SIZES[name], device, tokens=tokens, repeats=20)
        found[f"products/{name}/tflops"] = speed
        print(f"products of {name}: {speed:.1f} TFLOP/s", flush=True)
    found |= measure(SIZES[given.size], device, tokens=tokens, repeats=20)
    given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
