"""Adapters by their formula: a Hugging Face model that is called with the matrices W + scale * B A."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Merged(nn.Module):
    """A model of which only adapters are trained, by PEFT's names with ``|`` for the dots.

    Experts, which Hugging Face has in two parameters of a layer, have adapters by expert.
    """

    def __init__(self, base: Any, adapters: Mapping[str, Tensor], scale: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = scale
        for name, value in adapters.items():
            self.register_parameter(name.replace(".", "|"), nn.Parameter(value.clone()))

    def _product(self, module: str, like: Tensor) -> Tensor:
        own = dict(self.named_parameters())
        name = module.replace(".", "|")
        if f"{name}|lora_A|weight" not in own:
            return torch.zeros_like(like)
        return self.scale * own[f"{name}|lora_B|weight"] @ own[f"{name}|lora_A|weight"]

    def _merged(self, name: str, value: Tensor) -> Tensor:
        module, _, kind = name.rpartition(".")
        if kind == "weight" and value.ndim == 2:
            return value + self._product(module, value)
        if module.endswith("experts") and kind == "down_proj":
            parts = [self._product(f"{module}.{expert}.down_proj", value[expert]) for expert in range(len(value))]
            return value + torch.stack(parts)
        if module.endswith("experts") and kind == "gate_up_proj":
            parts = []
            for expert in range(len(value)):
                gate, up = value[expert].chunk(2)
                names = (f"{module}.{expert}.gate_proj", gate), (f"{module}.{expert}.up_proj", up)
                parts.append(torch.cat([self._product(*one) for one in names]))
            return value + torch.stack(parts)
        return value

    def forward(self, **inputs: Any) -> Any:
        state = {name: self._merged(name, value) for name, value in self.base.named_parameters()}
        return torch.func.functional_call(self.base, state, (), inputs)
