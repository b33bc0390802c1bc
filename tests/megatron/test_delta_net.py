"""Delta nets against their definition, position by position in float64, with gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megarl.megatron.delta_net import _convolved, delta_rule
from megarl.models.dims import DELTA_CHUNK as CHUNK


def definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, strength: torch.Tensor
) -> torch.Tensor:
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state = torch.zeros(*query.shape[:2], query.shape[-1], value.shape[-1], dtype=query.dtype)
    outputs = []
    for t in range(query.shape[2]):
        state = state * decay[:, :, t, None, None].exp()
        known = torch.einsum("bhk,bhkv->bhv", key[:, :, t], state)
        change = strength[:, :, t, None] * (value[:, :, t] - known)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, :, t], change)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, :, t], state) / query.shape[-1] ** 0.5)
    return torch.stack(outputs, 2)


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_the_rule_equals_the_definition(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, 3, length, 8), (2, 3, length, 8), (2, 3, length, 10), (2, 3, length), (2, 3, length)]
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    exact[3] = -F.softplus(exact[3])
    exact[4] = exact[4].sigmoid()
    found = [x.float().requires_grad_() for x in exact]
    wanted = [x.requires_grad_() for x in exact]
    outputs = delta_rule(*found), definition(*wanted)
    torch.testing.assert_close(outputs[0].double(), outputs[1], rtol=0, atol=1e-5)
    gradient = torch.randn(outputs[1].shape, generator=generator, dtype=torch.float64)
    outputs[0].backward(gradient.float())
    outputs[1].backward(gradient)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=1e-5)


def test_the_convolution_does_not_see_other_sequences() -> None:
    lengths, channels, width = (1, 5, 3), 4, 4
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(lengths), channels, generator=generator)
    weight = torch.randn(channels, 1, width, generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    parts = []
    for part in x.split(lengths):
        padded = F.pad(part.T, (width - 1, 0))
        parts.append(F.silu(F.conv1d(padded, weight, groups=channels)).T)
    torch.testing.assert_close(_convolved(x, weight, positions), torch.cat(parts))
