"""Packed attention by rectangles against one call per sequence: CPU time of forward and backward, and their ratio.

    python -m benchmarks.packed_attention [--rounds 5]

The shapes are those of a small model on short answers, and of longer sequences, where nothing may be lost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from time import process_time

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.data.packing import PackShape
from megarl.megatron.attention import PackedAttention, PackParams, pack_arrays
from megarl.megatron.staging import to_device

HEADS, KV_HEADS, DIM = 4, 2, 32
PACKS = {
    "64 of 10 to 20 tokens": (64, 10, 20),
    "64 of 2 to 30 tokens": (64, 2, 30),
    "16 of 50 to 200 tokens": (16, 50, 200),
    "4 of 500 to 700 tokens": (4, 500, 700),
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args(arguments).rounds
    torch.set_num_threads(1)
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS, kv_channels=DIM)
    attention = PackedAttention(config=config)
    rng = np.random.default_rng(0)
    for name, (sequences, least, most) in PACKS.items():
        lengths = rng.integers(least, most + 1, sequences).tolist()
        shape = PackShape(cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32), max_seqlen=max(lengths))
        q, k, v = (torch.randn(sum(lengths), n, DIM, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS))

        def by_rectangle(shape: PackShape = shape, qkv: tuple[torch.Tensor, ...] = (q, k, v)) -> torch.Tensor:
            return attention(
                *qkv, None, packed_seq_params=PackParams.of(shape, to_device(pack_arrays(shape), torch.device("cpu")))
            )

        def one_by_one(lengths: list[int] = lengths, qkv: tuple[torch.Tensor, ...] = (q, k, v)) -> torch.Tensor:
            return torch.cat([_alone(*parts) for parts in zip(*(x.split(lengths) for x in qkv), strict=True)])

        torch.testing.assert_close(by_rectangle(), one_by_one(), rtol=0, atol=1e-5)
        ours, loop = _milliseconds(by_rectangle, rounds), _milliseconds(one_by_one, rounds)
        print(f"{name:24} rectangles {ours:6.2f} ms, one by one {loop:6.2f} ms: {ours / loop:.2f} of it")


def _alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return (
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).squeeze(0).transpose(0, 1).flatten(1)
    )


def _milliseconds(forward: Callable[[], torch.Tensor], rounds: int) -> float:
    """The best of some rounds of forward and backward passes."""
    best = float("inf")
    for _ in range(rounds):
        start = process_time()
        for _ in range(10):
            forward().sum().backward()
        best = min(best, (process_time() - start) * 100)
    return best


if __name__ == "__main__":
    main(sys.argv[1:])
