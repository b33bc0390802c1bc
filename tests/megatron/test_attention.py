"""Packed attention against one sequence at a time by the definition, in float64, with gradients."""

from __future__ import annotations

import pytest
import torch

from megarl.data.packing import PackShape
from megarl.megatron.attention import PackedAttention, PackParams, arrange, pack_arrays
from megarl.megatron.staging import to_device
from tests.pool import RankPool

HEADS, KV_HEADS = 4, 2
LENGTHS = [
    [7],
    [1, 1, 1],
    [16, 17, 16, 1, 33, 32],
    [90, 3, 3, 64, 5, 64, 64, 2],
    [2, 30] * 20,
]


def attention_errors(
    rank: int, device: str, dtype: torch.dtype, lengths: list[int], dim: int = 16, window: int | None = None
) -> dict[str, float]:
    """Largest difference of the output and of the gradients of its inputs, relative to the largest element or 1."""
    import numpy as np
    from megatron.core.transformer.transformer_config import TransformerConfig

    del rank
    sizes = {"num_layers": 1, "hidden_size": HEADS * dim, "num_attention_heads": HEADS, "kv_channels": dim}
    config = TransformerConfig(**sizes)
    shape = PackShape(cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32), max_seqlen=max(lengths))
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(sum(lengths), heads, dim, generator=generator, dtype=torch.float64).to(dtype).double()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    grad = torch.randn(sum(lengths), HEADS * dim, generator=generator, dtype=torch.float64).to(dtype).double()
    inputs = [tensor.to(device, dtype).requires_grad_() for tensor in exact]
    output = PackedAttention(config=config, window=window)(
        *inputs, None, packed_seq_params=PackParams.of(shape, to_device(pack_arrays(shape), torch.device(device)))
    )
    output.backward(grad.to(device, dtype))

    for tensor in exact:
        tensor.requires_grad_()
    parts = zip(*(x.split(lengths) for x in exact), strict=True)
    expected = torch.cat([definition(*part, scale=dim**-0.5, window=window) for part in parts]).flatten(1)
    expected.backward(grad)
    pairs = {"output": (output, expected)} | {
        name: (found.grad, want.grad) for name, found, want in zip("qkv", inputs, exact, strict=True)
    }
    return {
        name: ((found.detach().cpu().double() - want).abs().max() / want.abs().max().clamp(min=1.0)).item()
        for name, (found, want) in pairs.items()
        if found is not None and want is not None
    }


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None = None
) -> torch.Tensor:
    """softmax(scale q k) v under a causal mask; [L, heads, dim], and twice [L, KV heads, dim], -> [L, heads, dim]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    positions = torch.arange(len(q))
    hidden = future | (positions[:, None] - positions >= (window or len(q)))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.dist
@pytest.mark.parametrize("window", [None, 1, 17])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}-sequences")
def test_attention_equals_the_definition(pool: RankPool, lengths: list[int], window: int | None) -> None:
    (errors,) = pool.run(attention_errors, "cpu", torch.float32, lengths, 16, window, world_size=1)
    assert errors.keys() == {"output", "q", "k", "v"}
    assert max(errors.values()) < 1e-5, errors


def _arrangement(rank: int, lengths: list[int]) -> tuple[tuple[tuple[int, int], ...], list[int], list[int]]:
    import numpy as np

    del rank
    shape = PackShape(cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32), max_seqlen=max(lengths))
    found = arrange(shape, torch.device("cpu"))
    return found.rectangles, found.position_of.tolist(), found.place_of.tolist()


@pytest.mark.dist
def test_padded_arrangement_by_hand(pool: RankPool) -> None:
    """Sequences of 2, 18, 3 and 17 tokens: 0 to 1, 2 to 19, 20 to 22 and 23 to 39; 40 is padding."""
    ((rectangles, position_of, place_of),) = pool.run(_arrangement, [2, 18, 3, 17], world_size=1)
    assert rectangles == ((2, 3), (2, 18))
    assert position_of == [0, 1, 40, 20, 21, 22, *range(2, 20), *range(23, 40), 40]
    assert place_of == [0, 1, *range(6, 24), 3, 4, 5, *range(24, 41)]
