"""Functions that megatron-core compiles are compiled at their first call, not before; wandb is not imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megarl.lazy_compiling import compiled_at_first_call

_TRAIN = """
import logging
import megarl.megatron.worker
assert logging.getLogger("megatron").level == 0, "a driver's logs and warnings stay as they are"
import torch
from megarl.megatron.platform import start_platform
start_platform("cpu")
import megarl.megatron.losses
parameter = torch.nn.Parameter(torch.ones(1))
adam = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.0)
adam.zero_grad()
parameter.grad = torch.ones(1)
adam.step()
adam.load_state_dict(adam.state_dict())
assert abs(parameter.item() - 0.9) < 1e-6 and torch.is_grad_enabled()
"""


@pytest.mark.process
def test_megatron_core_trains_without_the_compiler_wandb_and_its_warnings() -> None:
    looked_for = "'megatron.core', 'torch._dynamo', 'torch._inductor.compile_fx', 'wandb'"
    program = f"{_TRAIN}\nimport sys; print([name for name in ({looked_for}) if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=240, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("['megatron.core']", "")


def test_a_function_is_compiled_once_with_its_options_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, Any]] = []

    def compile_(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled.append(options)
        return lambda *args, **kwargs: ("compiled", function(*args, **kwargs))

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    with compiled_at_first_call():

        @torch.compile
        def double(x: int) -> int:
            return 2 * x

        @torch.compile(dynamic=True)
        def power(x: int, *, exponent: int) -> int:
            return x**exponent

    assert torch.compile is compile_
    assert compiled == []
    assert [double(3), double(4)] == [("compiled", 6), ("compiled", 8)]
    assert power(2, exponent=3) == ("compiled", 8)
    assert compiled == [{}, {"dynamic": True}]
    assert power.__name__ == "power"


def test_where_torch_compiles_nothing_a_function_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with compiled_at_first_call():
        double: Callable[[int], int] = torch.compile(lambda x: 2 * x, dynamic=True)
    assert double(3) == 6
