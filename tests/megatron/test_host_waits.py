"""An update makes the host wait for the device nowhere between the start of a micro-batch and the optimizer step."""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.gpu import roofline
from benchmarks.gpu.work import Size
from megarl.config.schema import Algo, Optimizer
from megarl.config.schema.loss_specs import PolicySpec, ValueSpec
from megarl.data.schedule import update_schedules
from megarl.experience.padded_batch import align, response_mask
from megarl.experience.records import ExperienceChunk
from megarl.megatron import attention
from megarl.megatron.losses import loss_maker
from megarl.megatron.staging import Places, packed_bytes, padded_places, to_device, unpacked
from megarl.types import Layout, Ragged
from tests.megatron.host_waits import Counts, counting
from tests.megatron.samples import random_chunks, with_kept
from tests.megatron.tiny import load_role, save_model
from tests.pool import RankPool

UPDATES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "grpo": (
        {"advantage": "grpo", "kl": {"in": "loss", "estimator": "k3", "coef": 0.1}},
        ("rollout_logprobs", "ref_logprobs", "advantages", "scored_mask", "ages"),
    ),
    "grpo of kept ids": ({"advantage": "grpo"}, ("rollout_logprobs", "advantages", "actor_mask", "ages")),
    "ppo actor": ({"mini_batches": 2}, ("old_logprobs", "advantages", "actor_mask")),
    "ppo critic": ({"mini_batches": 2}, ("old_values", "returns", "scored_mask")),
}
"""Settings of ``algo`` and the columns of the experience."""


PACK = 40
"""Tokens of a micro-batch, with padding."""


def experience_of(chunks: list[Any], names: tuple[str, ...]) -> dict[int, ExperienceChunk]:
    made: dict[int, ExperienceChunk] = {}
    for index, chunk in enumerate(chunks):
        random = np.random.default_rng(index)
        columns: dict[str, Any] = {"advantages": chunk.rollout_logprobs}
        for name in names:
            rows = [random.normal(size=len(row)) for row in chunk.response_ids]
            if name.endswith("_mask"):
                rows = [np.full(len(row), number % 3 > 0) for number, row in enumerate(rows)]
            columns[name] = Ragged.from_rows(rows, np.float32)
        shared = ("sample_ids", "prompt_ids", "response_ids", "kept_counts", "kept_ids")
        tokens = {name: getattr(chunk, name) for name in shared}
        made[index] = ExperienceChunk(**tokens, **columns)
    return made


def prepared(rank: int, directory: Path, update: str, fused: bool) -> tuple[Any, Callable[[], Any], int]:
    """A role, an update of it with several micro-batches, and how many there are."""
    fields, names = UPDATES[update]
    algo = Algo.model_validate(fields)
    is_critic = update.endswith("critic")
    head = torch.ones(1, 32) / 8 if is_critic else None
    options: dict[str, Any] = {"layers": "local", "trainable": True, "head": head, "fused": fused}
    role = load_role(directory, "critic" if is_critic else "actor", Layout(), rank, dtype=torch.bfloat16, **options)
    role.start_training(Optimizer(lr=1e-3), total_steps=2)
    chunks, infos = random_chunks()
    if "kept" in update:
        chunks = with_kept(chunks)
    experience = experience_of(chunks, names)
    spec: Any = ValueSpec(algo=algo) if is_critic else PolicySpec(algo=algo, temperature=0.9, max_staleness=1)
    make_loss = loss_maker(spec, role, experience, kl_coef=0.1)
    (schedule,) = update_schedules(infos, Layout(), PACK, mini_batches=1, epochs=1, seed=0, step=0)
    own = schedule.ranks[0]
    return role, lambda: role.update([own], experience, make_loss), len(own.packs)


def counted(rank: int, directory: Path, update: str, fused: bool = False) -> tuple[Any, int]:
    """What an update does, and its number of micro-batches."""
    role, take, micro_batches = prepared(rank, directory, update, fused)
    with ExitStack() as stack:
        counter = stack.enter_context(counting(tensors_of(role)))
        stack.enter_context(patch.object(attention, "kernel_takes", lambda _: True))
        kernel = counter.as_one("attention", _kernel, product=True)
        stack.enter_context(patch("torch.nn.attention.varlen.varlen_attn", kernel))
        for function in FUSED if fused else ():
            kernel = counter.as_one(function, pkgutil.resolve_name(function), linear=function == ROPE)
            stack.enter_context(patch(function, kernel))
        step = role._optimizer_step

        def optimizer_step(optimizer: Any) -> Any:
            counter.counts.phase = "step"
            return step(optimizer)

        stack.enter_context(patch.object(role, "_optimizer_step", optimizer_step))
        take()  # fills caches, and makes Adam's state
        counter.counts = Counts()
        take()
    return counter.counts, micro_batches


def without_waits(rank: int, directory: Path, update: str) -> None:
    """Takes an update on CUDA, in which torch raises where the host waits before the optimizer step."""
    role, take, _ = prepared(rank, directory, update, fused=True)
    take()
    step = role._optimizer_step

    def optimizer_step(optimizer: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return step(optimizer)

    try:
        with patch.object(role, "_optimizer_step", optimizer_step):
            torch.cuda.set_sync_debug_mode("error")
            take()
    finally:
        torch.cuda.set_sync_debug_mode("default")


ROPE = "megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_bshd"
LOGITS = (
    "megarl.megatron.platform.logit_kernels.logit_statistics",
    "megarl.megatron.platform.logit_kernels.logit_gradient_",
)
FUSED = (
    "torch.nn.functional.rms_norm",
    "megatron.core.fusions.fused_bias_swiglu.swiglu",
    "megatron.core.fusions.fused_bias_swiglu.swiglu_back",
    ROPE,
    *LOGITS,
)
"""Functions that are one kernel on CUDA."""


def tensors_of(role: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that a role has on the device before its first step; Adam counts steps on the host."""
    for chunk in role.model.chunks:
        for module in chunk.modules():
            yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))
            yield from module.parameters(recurse=False)
    yield from role.optimizer.state()
    yield from role.optimizer._gradient_buffers()
    for chunk in role.optimizer.chunks:
        yield from (buffer.param_data for buffer in chunk.buffers if buffer.param_data is not None)


def _kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
    """Any function of the kernel's shapes."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {n: save_model(directory / str(n), "qwen3", num_hidden_layers=n, head_dim=8) for n in (2, 3)}


COPY = "pageable copy to the device"
ALLOWED: dict[str, dict[tuple[str, str], int]] = {
    # Gloo's reduce-scatter of the gradients, after the last micro-batch; NCCL's works on the device.
    "forward": {("megatron/core/distributed/param_and_grad_buffer.py:start_grad_sync", COPY): 1},
    "backward": {},
    # The gradient norm, twice as apex is not there, and the metrics.
    "step": {
        ("megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32", "_local_scalar_dense"): 1,
        ("megatron/core/utils.py:local_multi_tensor_l2_norm", COPY): 1,
        ("megarl/megatron/loss_metrics.py:_over_all", "copy to the host"): 5,
    },
}
"""The waits of an optimizer step, by phase."""


@pytest.mark.dist
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("update", UPDATES)
def test_the_host_waits_only_once_an_optimizer_step(
    pool: RankPool, models: dict[int, Path], update: str, fused: bool
) -> None:
    ((counts, micro_batches),) = pool.run(counted, models[2], update, fused, world_size=1)
    assert micro_batches > 1
    found = {phase: dict(counts.waits.get(phase, {})) for phase in ALLOWED}
    assert found == ALLOWED


def difference(fewer: Counts, more: Counts) -> Counts:
    """The counts of the layers that one model has more."""
    found = Counts()
    for name in ("kernels", "products", "moved_bytes"):
        tables = {phase: table - getattr(fewer, name)[phase] for phase, table in getattr(more, name).items()}
        setattr(found, name, tables)
    return found


BOUNDS = {
    False: {"forward": (62, 10_484), "backward": (93, 20_768)},
    True: {"forward": (10, 2_020), "backward": (18, 2_792)},
}
"""Of a layer of 32 hidden elements in a micro-batch, with fused kernels or without: kernels besides products, and the
bytes that they read or write for a token, gradients of weights apart."""
OUTSIDE = {"grpo": (310, 70), "grpo of kept ids": (310, 82), "ppo actor": (158, 54), "ppo critic": (108, 40)}
"""Kernels of a micro-batch outside the layers, forward and backward, where kernels are fused."""


@pytest.mark.dist
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("update", UPDATES)
def test_a_micro_batch_starts_few_kernels_that_move_few_bytes(
    pool: RankPool, models: dict[int, Path], update: str, fused: bool
) -> None:
    counts: dict[int, Counts] = {}
    for layers, directory in models.items():
        ((counts[layers], micro_batches),) = pool.run(counted, directory, update, fused, world_size=1)
    layer = difference(counts[2], counts[3])
    assert layer.products["forward"] == {"mm": 4 * micro_batches, "attention": micro_batches}
    for place, (phase, (kernels, nbytes)) in enumerate(BOUNDS[fused].items()):
        found = layer.kernels[phase]
        assert found.total() <= kernels * micro_batches, found
        moved = {name: layer.moved_bytes[phase][name] for name in found if name != "add_"}
        assert sum(moved.values()) <= nbytes * micro_batches * PACK, moved
        if fused:
            outside = counts[2].kernels[phase].total() - 2 * found.total()
            assert outside <= OUTSIDE[update][place] * micro_batches


@pytest.mark.dist
@pytest.mark.parametrize(
    "size",
    [
        Size(layers=2, hidden=64, ffn=96, heads=8, kv_heads=2, vocab=2000),
        pytest.param(Size(layers=2, hidden=128, ffn=96, heads=4, kv_heads=2, vocab=2000), marks=pytest.mark.matrix),
        Size(layers=2, hidden=64, ffn=160, heads=4, kv_heads=2, vocab=2000, family="qwen3"),
    ],
    ids=["qwen2 of 64", "qwen2 of 128", "qwen3"],
)
def test_the_roofline_of_the_benchmark_has_the_bytes_that_are_counted(
    pool: RankPool, tmp_path: Path, size: Size
) -> None:
    """Within 3%: the weights of norms and biases are not in it, nor the columns of log-probabilities."""
    counts: dict[int, Counts] = {}
    for layers in (2, 3):
        fields = replace(size, layers=layers).hf_config
        directory = save_model(tmp_path / str(layers), fields.pop("model_type"), **fields)
        ((counts[layers], micro_batches),) = pool.run(counted, directory, "ppo actor", True, world_size=1)
    layer = difference(counts[2], counts[3])
    moved: Counter[str] = Counter()
    for phase in ("forward", "backward"):
        for name in layer.kernels[phase]:
            moved[name] += layer.moved_bytes[phase][name]
    parameters = roofline.layer_parameters(size)
    gradients = moved.pop("add_")
    assert gradients == pytest.approx(micro_batches * roofline.GRADIENT_BYTES * parameters, rel=0.03)
    tokens = micro_batches * PACK
    assert moved.total() == pytest.approx(roofline.VALUE_BYTES * tokens * roofline.layer_values(size), rel=0.03)

    logits = sum(counts[2].moved_bytes[phase][name] for phase in ("forward", "backward") for name in LOGITS)
    read = sum(len(row) for chunk in random_chunks()[0] for row in chunk.response_ids)
    assert logits == pytest.approx(roofline.VALUE_BYTES * read * roofline.logit_values(size), rel=0.03)

    step = layer.moved_bytes["step"]
    around = step["linalg_vector_norm"] + step["copy_"]
    around += sum(layer.moved_bytes["forward"][name] for name in ("zero_", "mul_"))
    assert around == pytest.approx(roofline.AROUND_ADAM_BYTES * parameters, rel=0.03)


DEVICE = torch.device("cpu")
WAITS: dict[str, tuple[Callable[[torch.Tensor], Any], str | None]] = {
    "item": (lambda x: x[0].item(), "_local_scalar_dense"),
    "bool": (lambda x: bool(x.sum() > 0), "_local_scalar_dense"),
    "list": (lambda x: x.tolist(), "copy to the host"),
    "array": (lambda x: x.cpu().numpy(), "copy to the host"),
    "copied to the host": (lambda x: torch.zeros(4).copy_(x), "copy to the host"),
    "boolean index": (lambda x: x[x > 1], "boolean index"),
    "boolean assignment": (lambda x: x.clone().__setitem__(x > 1, x[:2]), "boolean index"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "masked_select": (lambda x: x.masked_select(x > 1), "masked_select"),
    "list to the device": (lambda x: torch.tensor([1, 2], device=x.device), COPY),
    "array to the device": (lambda x: torch.from_numpy(np.ones(4)).to(DEVICE), COPY),
    "host memory in a kernel": (lambda x: x + torch.from_numpy(np.ones(4)), COPY),
    "host index": (lambda x: x[torch.tensor([0, 1])], COPY),
    "number": (lambda x: x * 2 + torch.tensor(1.0), None),
    "where": (lambda x: torch.where(x > 1, x, 0.0).sum(), None),
    "made there": (lambda x: x + torch.arange(4, device=x.device), None),
    "host alone": (lambda _: torch.arange(4)[torch.arange(4) > 1].tolist(), None),
    "staged": (lambda x: x[to_device({"i": np.array([0, 1])}, DEVICE)["i"]], None),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_counter_knows_what_waits(name: str) -> None:
    call, what = WAITS[name]
    with counting([x := torch.tensor([0.0, 1.0, 2.0, 3.0])]) as counter:
        call(x)
    found = {kind for waits in counter.counts.waits.values() for _, kind in waits}
    assert found == ({what} if what else set())


def test_the_counter_counts_kernels_and_their_bytes() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    slope = torch.ones(())
    with counting([x]) as counter:
        norm = counter.as_one("norm", lambda x: x / x.square().sum())
        (norm(x.view(2, 8)).reshape(4, 4) @ x).exp().sum().backward(slope)
    counts = counter.counts
    assert counts.kernels["forward"] == {"norm": 1, "exp": 1, "sum": 1}
    assert counts.products["forward"] == {"mm": 1}
    assert counts.moved_bytes["forward"] == {"norm": 2 * 64, "mm": 3 * 64, "exp": 2 * 64, "sum": 64 + 4}
    assert counts.kernels["backward"]["norm backward"] == 1
    assert counts.moved_bytes["backward"]["norm backward"] == 3 * 64
    assert counts.products["backward"] == {"mm": 2}


LENGTHS = ([], [0], [3], [2, 0, 5, 1])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_indices_made_on_the_host_align_as_a_mask_does(lengths: list[int]) -> None:
    indices, shape = padded_places(lengths)
    places = Places(**to_device(indices, DEVICE))
    mask = response_mask(lengths)
    flat = torch.randn(sum(lengths)).index_fill(0, torch.arange(min(1, sum(lengths))), -0.0).requires_grad_()
    found = places.spread(flat).view(shape)
    assert torch.equal(found.signbit(), align(flat, mask).signbit())
    assert torch.equal(found, align(flat, mask))
    assert torch.equal(places.collect(found.flatten()), flat)
    slopes = torch.full(shape, torch.nan).masked_scatter(mask, torch.arange(sum(lengths)).float())
    found.backward(slopes)
    assert flat.grad is not None
    assert torch.equal(flat.grad, slopes[mask]), "NaN off the mask does not reach the values"


def test_arrays_of_all_types_come_back_from_one_buffer() -> None:
    arrays = {
        "ids": np.arange(5),
        "mask": np.array([[True, False, True]]),
        "nothing": np.zeros((0, 3), np.int64),
        "values": np.array([[0.5, -1.0], [np.pi, 2.0]], np.float32),
    }
    tensors = to_device(arrays, DEVICE)
    buffer = torch.empty(packed_bytes(tensors), dtype=torch.uint8)
    parts = unpacked(buffer, tensors)
    for name, part in parts.items():
        part.copy_(tensors[name])
    for name, array in arrays.items():
        found = parts[name].numpy()
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
