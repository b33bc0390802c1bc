"""Delta nets against their definition, position by position in float64, with gradients."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megarl.data.packing import PackShape
from megarl.megatron.attention import PackParams, pack_arrays
from megarl.megatron.delta_net import _by_rectangle, _convolved, by_kernel, delta_rule
from megarl.megatron.staging import to_device
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


@pytest.mark.parametrize("key_heads", [1, 3])
def test_packs_go_to_the_kernel_as_it_is_documented(monkeypatch: pytest.MonkeyPatch, key_heads: int) -> None:
    """In place of flash-linear-attention's kernel (0.6) is the definition, for sequences one after the other."""

    def chunk_gated_delta_rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: torch.Tensor,
        cu_seqlens_cpu: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        assert use_qk_l2norm_in_kernel
        assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        shared = v.shape[2] // q.shape[2]
        tensors = [q.repeat_interleave(shared, 2), k.repeat_interleave(shared, 2), v, g, beta]
        outputs = []
        for start, stop in pairwise(cu_seqlens.tolist()):
            of_sequence = definition(*(x[:, start:stop].transpose(1, 2) for x in tensors))
            outputs.append(of_sequence.transpose(1, 2))
        return torch.cat(outputs, 1), None

    module = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.ops", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    shape = PackShape(cu_seqlens=np.array([0, 5, 6, 70], np.int32), max_seqlen=64)
    pack = PackParams.of(shape, to_device(pack_arrays(shape), torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(70, key_heads, 8, generator=generator) for _ in range(2))
    value = torch.randn(70, 3, 10, generator=generator)
    decay = -F.softplus(torch.randn(70, 3, generator=generator))
    strength = torch.rand(70, 3, generator=generator)
    found = by_kernel(query, key, value, decay, strength, pack)
    query, key = (x.repeat_interleave(3 // key_heads, 1) for x in (query, key))
    wanted = _by_rectangle(query, key, value, decay, strength, pack.arrangement)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


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
