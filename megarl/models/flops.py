"""Floating-point operations of a model's passes, and the peaks of devices.

Counted are the matrix products that a pass needs, two operations per multiplication: those of the
layers for every token, causal attention, the states of delta nets position by position, and the head
where it is read. Padding, what is computed twice to save memory, embeddings, norms and activations do
not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from megarl.models.architecture import ModelSpec
from megarl.types import HeadName, PackRow, SampleInfo

PEAK_TFLOPS: Mapping[str, float] = {
    "GB300": 2500.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
}
"""Dense bfloat16 TFLOP/s by a part of the device's name, the first that occurs; from NVIDIA's data sheets."""

TokenCounts = PackRow | SampleInfo


def peak_tflops(device_name: str) -> float | None:
    """Returns the peak of a device by torch's name for it; None if it is not in the table."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def token_flops(spec: ModelSpec) -> int:
    """Returns the operations of all layers for one token, without attention between tokens."""
    dims = spec.dims
    megatron = spec.table.megatron
    attention = 2 * dims.hidden * dims.head_dim * (dims.heads + dims.kv_heads)
    if dims.mla is not None:
        attention = _latent_attention(spec)
    if megatron.get("attention_output_gate"):
        attention += dims.hidden * dims.head_dim * dims.heads
    matrices = 3 if megatron["gated_linear_unit"] else 2
    layers = 0
    for kind in spec.table.layers:
        if kind.is_delta_net:
            layers += _delta_net(spec)
        else:
            layers += attention
        if kind.is_mixture:
            layers += dims.hidden * (matrices * dims.expert_ffn * megatron["moe_router_topk"] + dims.experts)
            layers += dims.hidden * matrices * dims.shared_ffn
            if megatron.get("moe_shared_expert_gate"):
                layers += dims.hidden
        else:
            layers += matrices * dims.hidden * dims.ffn
    return 2 * layers


def _latent_attention(spec: ModelSpec) -> int:
    """Returns the multiplications of the projections of latent attention for a token."""
    dims = spec.dims
    mla = dims.mla
    assert mla is not None
    queries = dims.hidden * dims.size("attention")
    if mla.queries is not None:
        queries = mla.queries * (dims.hidden + dims.size("attention"))
    latent = dims.hidden * (mla.latent + mla.rotated) + mla.latent * dims.size("expanded_latent")
    return queries + latent + dims.size("values") * dims.hidden


def _delta_net(spec: ModelSpec) -> int:
    """Returns the multiplications of a delta net for a token: projections, convolution, and three with the state."""
    delta = spec.dims.delta
    assert delta is not None
    keys = delta.key_heads * delta.key_dim
    values = delta.value_heads * delta.value_dim
    projections = spec.dims.hidden * (2 * keys + 3 * values + 2 * delta.value_heads)
    return projections + delta.width * (2 * keys + values) + 3 * values * delta.key_dim


def forward_flops(spec: ModelSpec, head: HeadName, sequences: Iterable[TokenCounts]) -> int:
    """Returns the operations of a forward pass over sequences, whose head is read at the response tokens.

    A forward and a backward pass have three times as many.
    """
    dims = spec.dims
    windows = Counter(kind.window for kind in spec.table.layers if not kind.is_delta_net)
    tokens = 0
    pairs = 0  # of all layers
    read = 0
    for sequence in sequences:
        length = sequence.tokens
        tokens += length
        for window, layers in windows.items():
            seen = min(length, window or length)
            pairs += layers * (seen * (seen + 1) // 2 + (length - seen) * seen)
        read += sequence.response_tokens
    attention = 2 * dims.heads * (dims.head_dim + dims.value_dim) * pairs
    outputs = dims.vocab if head == "lm" else 1
    return token_flops(spec) * tokens + attention + 2 * dims.hidden * outputs * read
