"""Fused kernels compute what their definitions do in float64, and Triton's compile for GPUs without one."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.kernels import EPS, TEMPERATURE, Case, cases, random_like
from benchmarks.gpu.work import SIZES, Size
from megarl.megatron.platform.kernels import FUSED, report
from tests.pool import RankPool

SHAPES = [(37, SIZES["tiny"]), (130, replace(SIZES["tiny"], hidden=92, heads=2, ffn=129, vocab=4099))]
"""Numbers of tokens, and sizes; heads of 32 and 46 elements."""


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def activation(x: Tensor) -> Tensor:
    gate, linear = x.chunk(2, dim=-1)
    return gate * gate.sigmoid() * linear


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Turns each pair of elements (x_i, x_{i + half}) by its angle."""
    turned = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), -1)) * torch.exp(1j * angles.chunk(2, dim=-1)[0])
    return torch.cat([turned.real, turned.imag], -1)


def logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


DEFINITIONS: dict[str, Callable[..., Any]] = {
    "norms": norm,
    "activation": activation,
    "rope": rope,
    "logprobs": logprobs,
}


def largest_errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Of each result and gradient, relative to its largest value."""
    pairs = zip(found, truth, strict=True)
    return [((x.double() - y).abs().max() / y.abs().max()).item() for x, y in pairs]


def check_fused_kernels(
    device: str, names: Collection[str], rounding: float = 2**-9, shapes: Sequence[tuple[int, Size]] = SHAPES
) -> None:
    """Compares results and gradients with definitions in float64 from the same numbers.

    In float32 their errors are those of sums; in bfloat16 not above the reference's.

    Args:
        rounding: error in bfloat16, relative to the largest value, that all may have: half a unit
            in the last place.
    """
    checked: Counter[str] = Counter()
    for tokens, size in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            for case in cases(size, dtype, device, tokens):
                if case.kernel in names:
                    _check(case, dtype, rounding)
                    checked[case.kernel] += 1
    assert checked == dict.fromkeys(names, 2 * len(shapes))


def _check(case: Case, dtype: torch.dtype, rounding: float) -> None:
    results = case.run(case.reference)
    gradients = random_like(results[: len(results) - sum(x.requires_grad for x in case.inputs)])
    inputs: list[Tensor] = []
    for x in case.inputs:
        wide = x.detach().double() if x.is_floating_point() else x
        inputs.append(wide.requires_grad_(x.requires_grad))
    exact = replace(case, inputs=tuple(inputs))
    truth = exact.run(DEFINITIONS[case.kernel], [gradient.double() for gradient in gradients])
    ours = largest_errors(case.run(case.fused, gradients), truth)
    usual = largest_errors(case.run(case.reference, gradients), truth)
    for our, other in zip(ours, usual, strict=True):
        limit = 5e-6 if dtype == torch.float32 else max(1.1 * other, rounding)
        assert our <= limit, (case.kernel, our, other)


@pytest.mark.process  # of the C++ compiler
def test_compiled_functions_equal_float64() -> None:
    check_fused_kernels("cpu", ["activation", "rope"], shapes=SHAPES[1:])  # each compiles for seconds


def _norms_and_logprobs(rank: int) -> None:
    check_fused_kernels("cpu", ["norms"])
    # Triton's interpreter (3.7) cuts float32 off where a GPU rounds it to bfloat16.
    check_fused_kernels("cpu", ["logprobs"], rounding=2**-7)


@pytest.mark.dist
def test_fused_kernels_equal_float64(pool: RankPool) -> None:
    """Triton's run in its interpreter."""
    pool.run(_norms_and_logprobs, world_size=1)


def _kernels_against_float64(rank: int, dtype: torch.dtype, offset: float) -> None:
    from megarl.megatron.platform.logit_kernels import logit_gradient_, logit_statistics

    generator = torch.Generator().manual_seed(5)
    for tokens, width in [(1, 1), (3, 37), (2, 4096), (5, 4097), (3, 12289), (0, 37)]:
        # What follows the products in memory must stay as it is.
        memory = torch.full((tokens * width + 64,), 7.0).to(dtype)
        products = memory[: tokens * width].view(tokens, width)
        products.copy_(4 * torch.randn(tokens, width, generator=generator) + offset)
        labels = torch.randint(width, (tokens,), generator=generator)
        labels[1::3] = -1  # another shard's
        labels[2::3] = width + 5
        x = (products.double() / 0.7).requires_grad_()
        here = (labels >= 0) & (labels < width)
        target = torch.where(here, x.gather(-1, labels.clamp(0, width - 1)[:, None])[:, 0], 0.0)
        top = x.detach().amax(-1) if tokens else x.detach().new_zeros(0)
        below = x - top[:, None]
        exact = torch.stack([top, below.exp().sum(-1), (below.exp() * below).sum(-1), target])
        found = logit_statistics(products, labels, 0.7)
        close = 2e-6 * (1 + abs(offset))
        torch.testing.assert_close(found.double(), exact.detach(), rtol=2e-6, atol=close)

        log_p = x.log_softmax(-1)
        log_z = x.logsumexp(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        logprob_slope, entropy_slope = torch.randn(2, tokens, generator=generator)
        # A label elsewhere adds its logit there, and this shard keeps its part of the normalizer.
        result = logprob_slope * (target - log_z) + entropy_slope * entropy
        (slope,) = torch.autograd.grad(result.sum(), x)
        columns = log_z.detach().float(), entropy.detach().float(), logprob_slope, entropy_slope
        gradient = logit_gradient_(products, labels, *columns, 0.7)
        assert gradient.data_ptr() == products.data_ptr(), "it needs no memory"
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(gradient.double(), slope / 0.7, rtol=rounding + 1e-5, atol=1e-5 * (1 + abs(offset)))
        assert (memory[tokens * width :] == 7).all()


@pytest.mark.dist
@pytest.mark.parametrize("offset", [0.0, -300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_logits_equal_float64(pool: RankPool, dtype: torch.dtype, offset: float) -> None:
    pool.run(_kernels_against_float64, dtype, offset, world_size=1)


@pytest.mark.process  # of Triton's assembler
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("aligned", [(), ("width",), ("tokens", "width")], ids=str)
@pytest.mark.parametrize(
    ("name", "pointers", "scalars"),
    [
        ("row_sums", {"products": "*bf16", "labels": "*i64", "statistics": "*fp32"}, ["tokens", "width"]),
        (
            "row_gradient",
            {"products": "*bf16", "labels": "*i64"}
            | dict.fromkeys(["log_z", "entropy", "logprob_slope", "entropy_slope"], "*fp32"),
            ["width"],
        ),
    ],
)
def test_kernels_of_logits_compile_for_gpus_within_their_registers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: int,
    aligned: tuple[str, ...],
    name: str,
    pointers: dict[str, str],
    scalars: list[str],
) -> None:
    """Eight warps of at most 64 registers fill a multiprocessor (65,536) by half and more."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megarl.megatron.platform import logit_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    signature = {**pointers, **dict.fromkeys(scalars, "i32"), "scale": "fp32", "BLOCK": "constexpr"}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for place, (argument, type_) in enumerate(signature.items()):
        # As Triton specializes a kernel for pointers and numbers that 16 divides, which it sees at a call.
        if type_.startswith("*") or argument in aligned:
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(getattr(logit_kernels, name), signature, {"BLOCK": logit_kernels.BLOCK}, attributes)
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source, target=target, options={"num_warps": logit_kernels.WARPS})
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(kernel.asm["ptx"])
    if name == "row_gradient":
        assert "cvt.rn.bf16" in kernel.asm["ptx"], "the gradient is rounded to the nearest"
    architecture = re.search(r"\.target (\w+)", kernel.asm["ptx"])
    assert architecture is not None
    assembler = knobs.nvidia.ptxas.path
    command = [assembler, "-v", f"--gpu-name={architecture[1]}", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", usage)
    spills = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", usage)
    assert registers is not None, usage
    assert int(registers[1]) <= 64, usage
    assert spills, usage
    assert set(spills) == {"0"}, usage


def test_the_report_names_what_computes_each_part_on_a_cpu() -> None:
    found = {part: what for part, what, _ in report("cpu")}
    assert found == {"layers": "Megatron's own", **dict.fromkeys(FUSED, "op by op")}
