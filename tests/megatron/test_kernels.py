"""Compiled kernels compute what the eager ones do, and ``TABLE`` alone chooses between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from benchmarks.gpu.kernels import Case, cases, measure, random_like
from benchmarks.gpu.work import SIZES
from megarl.megatron.platform import kernels

TOKENS = 37


def largest_errors(found: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    """Of each result and gradient, relative to its largest value."""
    pairs = zip(found, truth, strict=True)
    return [((x.double() - y.double()).abs().max() / y.double().abs().max()).item() for x, y in pairs]


def in_float32(case: Case, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the eager kernel computes from the same numbers in float32."""
    inputs = tuple(x.detach().float().requires_grad_(x.requires_grad) for x in case.inputs)
    wide = Case(kernel=case.kernel, eager=case.eager, compiled=case.compiled, inputs=inputs)
    return wide.run(wide.eager, [gradient.float() for gradient in gradients])


def check_compiled_kernels(device: str) -> None:
    """In float32 they equal the eager ones; in bfloat16 they are at least as near to these in float32."""
    for case in cases(SIZES["tiny"], torch.float32, device, TOKENS):
        # Sums of float32 in another order.
        assert max(largest_errors(case.run(case.compiled), case.run(case.eager))) < 5e-6, case.kernel
    for case in cases(SIZES["tiny"], torch.bfloat16, device, TOKENS):
        results = case.run(case.eager)
        gradients = random_like(results[: len(results) - sum(x.requires_grad for x in case.inputs)])
        truth = in_float32(case, gradients)

        def errors(function: Callable[..., Any]) -> list[float]:
            return largest_errors(case.run(function, gradients), truth)  # noqa: B023

        for ours, usual in zip(errors(case.compiled), errors(case.eager), strict=True):
            # Half a unit in the last place of bfloat16 is 2**-9 of the largest value.
            assert ours <= max(1.1 * usual, 2**-9), (case.kernel, ours, usual)


@pytest.mark.process  # of the C++ compiler
def test_compiled_kernels_equal_the_eager_ones() -> None:
    check_compiled_kernels("cpu")
    found = measure(SIZES["tiny"], "cpu", tokens=TOKENS, repeats=1)
    assert found.keys() == set(get_args(kernels.Kernel))
    assert all(min(one["eager_ms"], one["compiled_ms"]) == one[f"{one['better']}_ms"] > 0 for one in found.values())


def test_what_the_table_has_compiled_is_compiled_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(x: float) -> float:
        return x / 2

    assert kernels.TABLE.keys() == set(get_args(kernels.Kernel))
    monkeypatch.setattr(kernels, "TABLE", {"rope": ("compiled", ""), "norms": ("eager", "")})
    monkeypatch.setattr(kernels, "compiled", lambda function: ("compiled", function))
    assert kernels.implementation("rope", half, "cuda") == ("compiled", half)
    assert kernels.implementation("rope", half, "cpu") is half
    assert kernels.implementation("norms", half, "cuda") is half


def test_the_report_names_what_computes_each_part_on_a_cpu() -> None:
    found = {part: what for part, what, _ in kernels.report("cpu")}
    assert found == {"layers": "Megatron's own", **dict.fromkeys(get_args(kernels.Kernel), "eager")}
