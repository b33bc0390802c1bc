"""Fused kernels compute what the reference does, and Triton's compile for GPUs without one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.kernels import Case, cases, random_like
from benchmarks.gpu.work import SIZES
from megarl.megatron.platform.kernels import FUSED, report
from tests.pool import RankPool

TOKENS = 37


def largest_errors(found: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    """Of each result and gradient, relative to its largest value."""
    pairs = zip(found, truth, strict=True)
    return [((x.double() - y.double()).abs().max() / y.double().abs().max()).item() for x, y in pairs]


def in_float32(case: Case, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the reference computes from the same numbers in float32."""
    inputs = tuple(x.detach().float().requires_grad_(x.requires_grad) for x in case.inputs)
    wide = Case(kernel=case.kernel, reference=case.reference, fused=case.fused, inputs=inputs)
    return wide.run(wide.reference, [gradient.float() for gradient in gradients])


def check_fused_kernels(device: str, names: Collection[str], rounding: float = 2**-9) -> None:
    """In float32 they equal the reference; in bfloat16 they are at least as near to it in float32.

    Args:
        rounding: error in bfloat16, relative to the largest value, that all may have: half a unit
            in the last place.
    """
    checked = set()
    for case in cases(SIZES["tiny"], torch.float32, device, TOKENS):
        if case.kernel in names:
            # Sums of float32 in another order.
            assert max(largest_errors(case.run(case.fused), case.run(case.reference))) < 5e-6, case.kernel
            checked.add(case.kernel)
    assert checked == set(names)
    for case in cases(SIZES["tiny"], torch.bfloat16, device, TOKENS):
        if case.kernel not in names:
            continue
        results = case.run(case.reference)
        gradients = random_like(results[: len(results) - sum(x.requires_grad for x in case.inputs)])
        truth = in_float32(case, gradients)

        def errors(function: Callable[..., Any]) -> list[float]:
            return largest_errors(case.run(function, gradients), truth)  # noqa: B023

        for ours, usual in zip(errors(case.fused), errors(case.reference), strict=True):
            assert ours <= max(1.1 * usual, rounding), (case.kernel, ours, usual)


@pytest.mark.process  # of the C++ compiler
def test_compiled_functions_equal_the_reference() -> None:
    check_fused_kernels("cpu", ["activation", "rope"])


def _norms_and_logprobs(rank: int) -> None:
    check_fused_kernels("cpu", ["norms"])
    # Triton's interpreter (3.7) cuts float32 off where a GPU rounds it to bfloat16.
    check_fused_kernels("cpu", ["logprobs"], rounding=2**-7)


@pytest.mark.dist
def test_fused_kernels_equal_the_reference(pool: RankPool) -> None:
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
    source = ASTSource(getattr(logit_kernels, name), signature, {"BLOCK": logit_kernels.BLOCK})
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
