"""The operations of a pass, against hand counts and against torch's count of Hugging Face's model."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.models import model_spec
from megarl.models.flops import forward_flops, peak_tflops
from tests.data.test_schedule import make_samples
from tests.megatron.families import MODELS
from tests.megatron.tiny import hf_config

RECURRENCE = 2 * (3 * (2 * 2 * 6 + 4 * 10) + 3 * 4 * 6 * 10)
"""Of a delta net of the tiny models, per token: 3 positions of the queries' and keys' 2 heads of 6 and the values'
4 heads of 10 under the convolution; and three products of 4 states of 6 x 10: what a key reads, writes, and a query."""


def test_flops_of_a_pass_by_hand() -> None:
    """2 layers of 8 channels, 4 heads of 2 with 2 KV heads, 16 MLP channels, 10 words; 3 + 2 and 1 + 0 tokens."""
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 10,
    }
    spec = model_spec(hf_config("qwen2", **sizes))
    matrices = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
    attention = 2 * (15 + 1) * 2 * 2 * 4 * 2  # layers, pairs of positions, two products, 2 per multiplication, heads
    body = 6 * 2 * matrices + attention
    samples = make_samples([(3, 2), (1, 0)], chunk_rows=2)
    assert forward_flops(spec, "lm", samples) == body + 2 * 2 * 8 * 10
    assert forward_flops(spec, "value", samples) == body + 2 * 2 * 8


def test_positions_outside_of_a_window_do_not_count() -> None:
    """Of 5 positions, the first sees 1 and the others 2 each."""
    windowed = model_spec(hf_config("mistral", sliding_window=2))
    whole = model_spec(hf_config("mistral", sliding_window=None))
    assert (
        model_spec({k: v for k, v in hf_config("mistral").items() if k != "sliding_window"}).table.layers[0].window
        == 4096
    )
    samples = make_samples([(3, 2)], chunk_rows=1)
    dims = whole.dims
    fewer = 4 * dims.layers * dims.heads * dims.head_dim * (15 - 9)
    assert forward_flops(whole, "lm", samples) - forward_flops(windowed, "lm", samples) == fewer


@pytest.mark.parametrize("family", MODELS)
def test_flops_of_a_pass_equal_those_that_torch_counts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts attention of all pairs of the n * n, of which the n * (n + 1) / 2 causal ones are needed.

    In the recurrent rule of delta nets transformers multiplies by elements, which torch does not count.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = hf_config(MODELS[family].kind, **MODELS[family].fields)
    tokens = 5  # no more than any window
    implementations: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), **implementations)
    delta_nets = config.get("layer_types", []).count("linear_attention")
    if delta_nets:
        code = sys.modules[type(model).__module__]
        monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", code.torch_recurrent_gated_delta_rule)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens).unsqueeze(0), use_cache=False).logits.sum().backward()
    products = 0
    for operation, flops in counter.get_flop_counts()["Global"].items():
        if "convolution" not in str(operation):  # of groups, whose backward pass torch counts as a whole one
            products += flops
    spec = model_spec(config)
    dims = spec.dims
    attended = (dims.layers - delta_nets) * dims.heads * (dims.head_dim + dims.value_dim)
    unneeded = 2 * attended * tokens * (tokens - 1) // 2
    needed = forward_flops(spec, "lm", make_samples([(0, tokens)], chunk_rows=1))
    assert products == 3 * (needed + unneeded - tokens * delta_nets * RECURRENCE)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA H20", 148), ("", None)],
)
def test_peaks_of_devices(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
