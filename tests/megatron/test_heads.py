"""The precision of the head of critics and reward models."""

from __future__ import annotations

import pytest
import torch


def test_a_16_bit_models_score_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two responses whose scores differ by less than bfloat16 has digits for are still told apart."""
    from megarl.megatron.model import ScalarHead

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    head = ScalarHead(64, torch.bfloat16)
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    hidden[1, 1:] = hidden[0, 1:]
    hidden[:, 0] = torch.tensor([0.0, 0.01])
    head.weight.data.copy_(torch.ones(1, 64))
    scores = head(hidden)
    expected = hidden.double().sum(-1)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)
    assert scores[1] > scores[0]
    scores.sum().backward()
    assert head.weight.grad is not None
    torch.testing.assert_close(head.weight.grad[0].double(), hidden.double().sum(0), rtol=1e-2, atol=1e-2)
