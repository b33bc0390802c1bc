"""Log-probabilities and gradients against Hugging Face for every kind of head size, by both ways of attention.

On a CPU the variable-length kernel is replaced by its definition, with the conditions that torch's has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.data.schedule import inference_schedule, update_schedules
from megarl.megatron import attention
from megarl.megatron.attention import kernel_takes
from megarl.megatron.supervised_losses import text_loss
from megarl.types import Layout, RolloutChunk
from tests.megatron.compare import logprobs_by_chunk, shards_of
from tests.megatron.samples import random_chunks
from tests.megatron.test_attention import definition
from tests.megatron.tiny import load_role, save_model
from tests.oracle.models import Sample, token_logits
from tests.pool import RankPool

SIZES = (4, 20, 64, 80, 96, 128, 256)

Parts = list[tuple[str, tuple[slice, ...], torch.Tensor]]
"""Regions of tensors, by Hugging Face's names."""

Found = tuple[torch.Tensor, Parts]
"""The log-probabilities of all response tokens, and the gradient of their negative mean."""


def model_of(directory: Path, size: int, dtype: str = "float32") -> Path:
    heads = {"head_dim": size, "num_attention_heads": 4, "num_key_value_heads": 2}
    return save_model(directory, "llama", num_hidden_layers=2, dtype=dtype, **heads)


def computed(
    rank: int, directory: Path, dtype: torch.dtype = torch.float32, way: str = "", layers: str = "local"
) -> Found:
    """The engine's results for a model.

    Args:
        way: ``kernel`` has the definition of the kernel in its place, on a CPU; else the device's own way.
    """
    rollouts, infos = random_chunks()
    layout = Layout()
    role = load_role(directory, "actor", layout, rank, trainable=True, dtype=dtype, layers=layers)
    role.start_training(Optimizer(lr=1e-3), total_steps=1)
    gradients: Parts = []

    def keep(_optimizer: Any) -> dict[str, float]:
        parameters = role.model.parameters().items()
        gradients.extend(shards_of(role, {name: parameter.main_grad.cpu().clone() for name, parameter in parameters}))
        return {}

    with _kernel_on_cpu() if way == "kernel" else nullcontext(), patch.object(role, "_optimizer_step", keep):
        (schedule,) = inference_schedule(infos, layout, 40).ranks
        column = logprobs_by_chunk(role, schedule, rollouts, 1.0)
        plan = update_schedules(infos, layout, 40, mini_batches=1, epochs=1, seed=0, step=0)
        role.update([schedule.ranks[0] for schedule in plan], rollouts, partial(text_loss, role))
    return torch.cat([torch.from_numpy(column[chunk].values.copy()) for chunk in sorted(column)]), gradients


@contextmanager
def _kernel_on_cpu() -> Iterator[None]:
    calls: list[int] = []

    def kernel(query: Any, key: Any, value: Any, *bounds: Any, **options: Any) -> torch.Tensor:
        calls.append(query.shape[-1])
        return _definition(query, key, value, *bounds, **options)

    with (
        patch.object(attention, "kernel_takes", lambda _: True),
        patch("torch.nn.attention.varlen.varlen_attn", kernel),
    ):
        yield
    assert calls


def _definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Causal attention within each sequence; [T, H, D], twice [T, K, D] -> [T, H, D]."""
    for x in (query, key, value):
        assert x.shape[-1] % 8 == 0
        assert x.shape[-1] <= 256
        assert x.stride(-1) == 1
    lengths = cu_seq_q.diff().tolist()
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == max(lengths)
    assert window_size == (-1, 0)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    return torch.cat([definition(*part, scale=scale) for part in parts])


def expected(directory: Path, chunks: list[RolloutChunk], dtype: torch.dtype) -> Found:
    """The same by Hugging Face's model, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    logprobs = []
    for chunk in chunks:
        for prompt, response in zip(chunk.prompt_ids, chunk.response_ids, strict=True):
            sample = Sample(sample_id="", prompt_ids=prompt.tolist(), response_ids=response.tolist())
            logits = token_logits(model, sample).to(torch.promote_types(dtype, torch.float32))
            logprobs.append(torch.log_softmax(logits, -1).gather(-1, torch.tensor(response)[:, None].long())[:, 0])
    flat = torch.cat(logprobs)
    (-flat.mean()).backward()
    return flat.detach(), [(name, (...,), parameter.grad) for name, parameter in model.named_parameters()]


def errors(got: Found, want: Found) -> dict[str, float]:
    """The largest difference of the log-probabilities, and of each gradient relative to its largest element."""
    return _compare(got, want, lambda difference, whole: (difference.abs().max() / whole.abs().max()).item())


def distances(got: Found, want: Found) -> dict[str, float]:
    """The mean difference of the log-probabilities, and of each gradient relative to its root mean square."""
    return _compare(got, want, lambda difference, whole: (difference.norm() / whole.norm()).item())


def _compare(got: Found, want: Found, of: Callable[[torch.Tensor, torch.Tensor], float]) -> dict[str, float]:
    """Compares log-probabilities, whose differences count as they are, and the gradient of each parameter."""
    whole = {name: gradient.double() for name, _, gradient in want[1]}
    differences = {name: torch.full_like(gradient, torch.nan) for name, gradient in whole.items()}
    for name, region, part in got[1]:
        differences[name][region] = part.double() - whole[name][region]
    logprobs = got[0].double() - want[0].double()
    return {"logprobs": of(logprobs, torch.ones_like(logprobs))} | {
        name: of(difference, whole[name]) for name, difference in differences.items()
    }


@pytest.mark.dist
@pytest.mark.parametrize("size", [4, 20, 64, 256])
def test_every_head_size_equals_hugging_face(pool: RankPool, tmp_path: Path, size: int) -> None:
    directory = model_of(tmp_path / "model", size)
    want = expected(directory, random_chunks()[0], torch.float64)
    for way in ("", "kernel"):
        (got,) = pool.run(computed, directory, torch.float32, way, world_size=1)
        # Sums of some hundreds of float32 products; log-probabilities of about 10 nats.
        assert {name: error for name, error in errors(got, want).items() if not error <= 1e-4} == {}


def test_the_kernel_takes_half_precision_and_heads_up_to_256() -> None:
    kinds = itertools.product((False, True), (torch.float32, torch.bfloat16, torch.float16), (*SIZES, 272))
    queries: list[Any] = [SimpleNamespace(is_cuda=cuda, dtype=dtype, shape=(1, 4, size)) for cuda, dtype, size in kinds]
    taken = {(query.dtype, query.shape[-1]) for query in queries if kernel_takes(query)}
    assert taken == set(itertools.product((torch.bfloat16, torch.float16), SIZES))
    assert not any(kernel_takes(query) for query in queries if not query.is_cuda)
