"""Triton kernels of the log-probabilities of a chunk of tokens.

Both read the products of hidden states and output weights as the matrix product leaves them, in
16 bits, and compute in float32. None writes logits: the gradient replaces the products.

The kernels also run in Triton's interpreter, and compile without a GPU. Shape legend: T tokens, V
rows of the local output layer.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Vocabulary entries that a program reads at a time."""
WARPS = 8

LOWEST = -3.0e38
"""Top of a shard without rows; a finite number, as the distance of two infinities is none."""


@triton.jit
def row_sums(
    products: tl.tensor,
    labels: tl.tensor,
    statistics: tl.tensor,
    tokens: tl.tensor,
    width: int,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Statistics of one row of ``products`` times ``scale``, one program a row.

    Args:
        products: [T, V].
        labels: [T] int64, columns; others than columns stand for labels of other shards.
        statistics: [4, T] float32 that is written: the largest logit x, sum exp(x - top),
            sum exp(x - top) * (x - top), and the label's logit or 0.
    """
    row = tl.program_id(0).to(tl.int64)
    line = products + row * width
    top = -3.0e38
    total = 0.0
    weighted = 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(line + columns, mask=columns < width, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(top, tl.max(x, 0))
        fall = top - higher
        keep = tl.exp(fall)
        weighted = keep * (weighted + total * fall)
        total = keep * total
        below = x - higher
        exp = tl.exp(below)
        total += tl.sum(exp, 0)
        weighted += tl.sum(exp * tl.where(exp > 0.0, below, 0.0), 0)
        top = higher
    label = tl.load(labels + row)
    here = (label >= 0) & (label < width)
    target = tl.load(line + label, mask=here, other=0.0).to(tl.float32) * scale
    tl.store(statistics + row, top)
    tl.store(statistics + tokens + row, total)
    tl.store(statistics + 2 * tokens + row, weighted)
    tl.store(statistics + 3 * tokens + row, target)


@triton.jit
def row_gradient(
    products: tl.tensor,
    labels: tl.tensor,
    log_z: tl.tensor,
    entropy: tl.tensor,
    logprob_slope: tl.tensor,
    entropy_slope: tl.tensor,
    width: int,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Replaces a block of ``products`` by its gradient, one program a block of a row.

    d logprob / d logits = onehot - p, and d entropy / d logits = -p (log p + entropy).

    Args:
        products: [T, V].
        log_z: [T] float32, as the entropies and the two gradients of the results.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    places = products + row * width + columns
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32) * scale
    slope = tl.load(logprob_slope + row)
    log_p = x - tl.load(log_z + row)
    pull = slope + (log_p + tl.load(entropy + row)) * tl.load(entropy_slope + row)
    onehot = tl.where(columns == tl.load(labels + row), slope, 0.0)
    gradient = (onehot - tl.exp(log_p) * pull) * scale
    tl.store(places, gradient.to(products.dtype.element_ty), mask=inside)


def logit_statistics(products: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Returns the statistics of ``row_sums``, [4, T] float32, of products [T, V]."""
    tokens, width = products.shape
    statistics = torch.empty(4, tokens, dtype=torch.float32, device=products.device)
    if tokens:
        launch = cast(Any, row_sums)[(tokens,)]
        launch(products, labels, statistics, tokens, width, 1 / temperature, BLOCK=BLOCK, num_warps=WARPS)
    return statistics


def logit_gradient_(
    products: Tensor,
    labels: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    logprob_slope: Tensor,
    entropy_slope: Tensor,
    temperature: float,
) -> Tensor:
    """Replaces products [T, V] by their gradient; see ``row_gradient``."""
    tokens, width = products.shape
    if tokens:
        columns = (x.contiguous() for x in (log_z, entropy, logprob_slope, entropy_slope))
        grid = (tokens, triton.cdiv(width, BLOCK))
        launch = cast(Any, row_gradient)[grid]
        launch(products, labels, *columns, width, 1 / temperature, BLOCK=BLOCK, num_warps=WARPS)
    return products
