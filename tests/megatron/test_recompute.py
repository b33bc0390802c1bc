"""Updates: recomputed activations are bit-exact, bfloat16 is reduced in float32, and CPU ranks use no GPU."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.types import Layout
from tests.megatron.families import MIXTURES, MODELS
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role, save_model
from tests.pool import RankPool, free_port


def counted_updates(
    rank: int, directory: Path, layout: Layout, recompute: str, dtype: torch.dtype = torch.float32, fused: bool = False
) -> dict[str, Any]:
    """Two optimizer steps, how often the parts of a layer ran forwards, and in what gradients and state are kept."""
    from megarl.data.schedule import update_schedules
    from megarl.megatron.supervised_losses import text_loss

    rollouts, infos = random_chunks()
    role = load_role(directory, "actor", layout, rank, trainable=True, dtype=dtype, recompute=recompute, fused=fused)
    role.start_training(Optimizer(lr=1e-3), total_steps=2)
    calls = {"norm": 0, "attention": 0, "mlp": 0}

    def count(name: str) -> Any:
        def called(*_: Any) -> None:
            calls[name] += 1

        return called

    for chunk in role.model.chunks:
        for layer in chunk.decoder.layers:
            layer.input_layernorm.register_forward_hook(count("norm"))
            layer.pre_mlp_layernorm.register_forward_hook(count("norm"))
            layer.self_attention.core_attention.register_forward_hook(count("attention"))
            layer.mlp.register_forward_hook(count("mlp"))

    plan = update_schedules(infos, layout, 40, mini_batches=2, epochs=1, seed=0, step=0)
    own = [schedule.ranks[role.coords.dp] for schedule in plan]
    steps = role.update(own, rollouts, partial(text_loss, role))
    weights = {name: parameter.detach().cpu().clone() for name, parameter in role.model.parameters().items()}
    layers = sum(len(chunk.decoder.layers) for chunk in role.model.chunks)
    passes = layers * sum(len(schedule.packs) for schedule in own)
    times = {name: number / passes for name, number in calls.items()}
    return {
        "steps": steps,
        "weights": weights,
        "times": times,
        "evaluated": role.evaluate(own[0], rollouts, partial(text_loss, role)),
        "gradients": {parameter.main_grad.dtype for parameter in role.model.parameters().values()},
        "state": {tensor.dtype for tensor in role.optimizer.state()},
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    ("family", "layout", "fused", "dtype"),
    [
        ("qwen3", Layout(tp=2, pp=2, sequence_parallel=True), False, torch.bfloat16),
        pytest.param(
            "qwen3", Layout(tp=2, pp=2, sequence_parallel=True), False, torch.float32, marks=pytest.mark.matrix
        ),
        ("qwen3", Layout(tp=2, sequence_parallel=True), True, torch.bfloat16),
        ("gpt2", Layout(pp=2, vpp=2), False, torch.float32),
        ("mixtral", Layout(tp=2, dp=2, ep=2, sequence_parallel=True), False, torch.bfloat16),
    ],
    ids=str,
)
def test_recomputation_is_bit_exact(
    pool: RankPool, tmp_path: Path, family: str, layout: Layout, fused: bool, dtype: torch.dtype
) -> None:
    """But for selective in float32, where gradients of an RMSNorm's input are added in another order."""
    directory = MODELS[family].save(tmp_path / "model")
    experts = family in MIXTURES
    twice = {
        "none": {"norm": 2, "attention": 1, "mlp": 1},
        "selective": {"norm": 4, "attention": 1, "mlp": 1 if experts else 2},
        "full": {"norm": 4, "attention": 2, "mlp": 2},
    }
    found: dict[str, Any] = {}
    for kind in twice:
        found[kind] = pool.run(counted_updates, directory, layout, kind, dtype, fused, world_size=layout.world_size)
    for kind, times in twice.items():
        for rank, result in enumerate(found[kind]):
            assert result["times"] == times
            reordered = kind == "selective" and dtype == torch.float32 and family == "qwen3"
            close = 1e-5 if reordered else 0.0  # Adam enlarges rounding: a step is 1e-3
            for what in ("steps", "weights", "evaluated"):
                torch.testing.assert_close(result[what], found["none"][rank][what], rtol=close, atol=close)


@pytest.mark.dist
def test_bfloat16_reduces_gradients_and_keeps_state_in_float32(pool: RankPool, tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    half, full = (
        pool.run(counted_updates, directory, Layout(dp=2), "none", dtype, world_size=2)
        for dtype in (torch.bfloat16, torch.float32)
    )
    for one, other in zip(half, full, strict=True):
        assert {tensor.dtype for tensor in one["weights"].values()} == {torch.bfloat16}
        assert one["gradients"] == one["state"] == {torch.float32}
        check_half_precision(one["steps"], other["steps"])


def check_half_precision(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Against the same steps in float32: bfloat16 has eight bits, and the errors of some tens of tokens cancel."""
    for got, want in zip(found, expected, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-2)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=5e-2)


def _believing(directory: Path, init_method: str) -> tuple[dict[str, Any], list[str], str | None]:
    """Updates where torch is built for CUDA and has counted a device, what was started, and the visible devices."""
    started: list[str] = []
    calls: dict[str, Any] = {
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_init": lambda: started.append("CUDA"),
        "_cuda_getCurrentRawStream": lambda _: started.append("a stream"),
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getStream": lambda _: started.append("a stream"),
    }
    for name, answer in calls.items():
        setattr(torch._C, name, answer)
    assert torch.cuda.is_available()
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("cuda")
    from megarl.megatron.platform import start_platform, start_world

    platform = start_platform("cpu")
    start_world(platform, rank=0, world_size=1, init_method=init_method)
    return counted_updates(0, directory, Layout(), "none"), started, os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.dist
def test_cpu_ranks_use_no_gpu(pool: RankPool, tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    (expected,) = pool.run(counted_updates, directory, Layout(), "none", world_size=1)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        call = process.submit(_believing, directory, f"tcp://127.0.0.1:{free_port()}")
        found, started, visible = call.result(timeout=200)
    assert started == []
    assert visible == ""
    torch.testing.assert_close(found["steps"], expected["steps"], rtol=0, atol=0)
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=0)


def _left_for_cuda(rank: int, directory: Path, layout: Layout) -> int:
    before = len(torch.cuda._queued_calls)
    counted_updates(rank, directory, layout, "none")
    return len(torch.cuda._queued_calls) - before


@pytest.mark.dist
def test_nothing_initializes_cuda(pool: RankPool, tmp_path: Path) -> None:
    """Sequence parallelism switches the random state of the device around dropout, also at rate 0."""
    directory, layout = save_model(tmp_path / "model"), Layout(tp=2, sequence_parallel=True)
    assert pool.run(_left_for_cuda, directory, layout, world_size=2) == [0, 0]
