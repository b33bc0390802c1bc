"""The Megatron engine on CUDA: against Hugging Face, against attention's definition, and against the CPU's ranks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.types import Layout, RoleName
from tests.megatron.memory import peaks
from tests.megatron.samples import random_chunks
from tests.megatron.test_attention import LENGTHS, attention_errors
from tests.megatron.test_head_sizes import SIZES, computed, distances, expected, model_of
from tests.megatron.test_host_waits import UPDATES, without_waits
from tests.megatron.test_memory_plan import PACK, assert_as_planned
from tests.megatron.test_memory_plan import SIZES as PLANNED
from tests.megatron.test_parity import check_half_precision as check_outputs
from tests.megatron.test_parity import differences, expectations, infer
from tests.megatron.test_recompute import check_half_precision, counted_updates
from tests.megatron.test_state import assert_same
from tests.megatron.tiny import hf_config, load_role, save_model
from tests.megatron.training import make_roles, plan, restore, save, snapshot, train
from tests.pool import RankPool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_outputs_equal_hugging_face(gpu: RankPool, tmp_path: Path, kind: str) -> None:
    directory = save_model(tmp_path / "model", kind)
    results = gpu.run(infer, directory, Layout(), 40, world_size=1)
    # Log-probabilities of about 10 nats in float32, whose sums a GPU takes in another order than a CPU.
    assert max(found.max() for found in differences(results, expectations(directory)).values()) <= 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_errors_are_no_larger_than_hugging_faces(gpu: RankPool, tmp_path: Path, tied: bool) -> None:
    check_outputs(gpu, save_model(tmp_path / "model", dtype="bfloat16", tie_word_embeddings=tied), Layout())


@pytest.mark.parametrize(
    ("lengths", "size"), [*((lengths, 16) for lengths in LENGTHS), *((LENGTHS[3], size) for size in (*SIZES, 272))]
)
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_packed_attention_equals_the_definition(
    gpu: RankPool, dtype: torch.dtype, bar: float, lengths: list[int], size: int
) -> None:
    (errors,) = gpu.run(attention_errors, "cuda", dtype, lengths, size, world_size=1)
    assert max(errors.values()) < bar, errors


@pytest.mark.parametrize("size", SIZES)
def test_gradient_errors_of_every_head_size_are_no_larger_than_hugging_faces(
    gpu: RankPool, tmp_path: Path, size: int
) -> None:
    directory, chunks = model_of(tmp_path / "model", size, "bfloat16"), random_chunks()[0]
    (found,) = gpu.run(computed, directory, torch.bfloat16, world_size=1)
    truth, theirs = (expected(directory, chunks, dtype) for dtype in (torch.float64, torch.bfloat16))
    ours, usual = distances(found, truth), distances(theirs, truth)
    assert {name for name in ours if not ours[name] <= 1.5 * usual[name] + 1e-3} == set(), (ours, usual)


@pytest.mark.parametrize("update", UPDATES)
def test_the_host_waits_only_once_an_optimizer_step(gpu: RankPool, tmp_path: Path, update: str) -> None:
    directory = save_model(tmp_path / "model", "qwen3", num_hidden_layers=2, head_dim=8)
    gpu.run(without_waits, directory, update, world_size=1)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_updates_equal_the_cpus(gpu: RankPool, pool: RankPool, tmp_path: Path, recompute: str) -> None:
    directory = save_model(tmp_path / "model")
    (expected,) = pool.run(counted_updates, directory, Layout(), "none", world_size=1)
    (full,) = gpu.run(counted_updates, directory, Layout(), recompute, world_size=1)
    (half,) = gpu.run(counted_updates, directory, Layout(), recompute, torch.bfloat16, world_size=1)
    for got, want in zip(full["steps"], expected["steps"], strict=True):
        assert got == pytest.approx(want, rel=1e-4)
    assert half["gradients"] == {torch.float32}
    assert torch.float32 in half["state"]
    assert torch.bfloat16 not in half["state"]
    check_half_precision(half["steps"], expected["steps"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_allocated_memory_is_as_planned(gpu: RankPool, tmp_path: Path, dtype: str, recompute: str) -> None:
    config = hf_config("qwen2", **PLANNED, dtype=dtype)
    (found,) = gpu.run(peaks, config, PACK, recompute, tmp_path, world_size=1)
    assert_as_planned(found, config, recompute, "cuda")


def _restored(rank: int, model: Path, other: Path, out: Path) -> None:
    """Restores what is written at once, and what is written while the role takes a step."""
    layouts: dict[RoleName, Layout] = {"actor": Layout()}
    role = make_roles(rank, {"actor": model}, layouts, torch.bfloat16)["actor"]
    again = make_roles(rank, {"actor": other}, layouts, torch.bfloat16)["actor"]
    train(role, 0, 2)
    saved = snapshot(role)
    save(role, out / "at once")
    write = plan(role, out / "later")
    train(role, 2, 1)
    write()
    for name in ("at once", "later"):
        train(again, 7, 1)
        restore(again, out / name)
        assert_same(snapshot(again), saved)
        train(again, 2, 1)  # by the fused Adam, which takes its state from the device alone


def test_a_restored_role_is_the_saved_one(gpu: RankPool, tmp_path: Path) -> None:
    models = (save_model(tmp_path / str(seed), "qwen2", seed, dtype="bfloat16") for seed in range(2))
    gpu.run(_restored, *models, tmp_path, world_size=1)


def _offloaded(rank: int, directory: Path) -> list[dict[str, int]]:
    """The allocator's memory while a role is offloaded and onloaded three times."""

    role = load_role(directory, "actor", Layout(), rank, trainable=True)
    role.start_training(Optimizer(lr=1e-3), total_steps=1)
    before = {name: parameter.detach().cpu().clone() for name, parameter in role.model.parameters().items()}
    found = []
    for _ in range(3):
        gc.collect()  # freed memory is not counted
        present = torch.cuda.memory_allocated()
        released = role.offload()
        away = torch.cuda.memory_allocated()
        role.onload()
        back = torch.cuda.memory_allocated()
        found.append({"released": released, "present": present, "away": away, "back": back})
    after: dict[str, Any] = role.model.parameters()
    assert all(torch.equal(after[name].cpu(), tensor) for name, tensor in before.items())
    return found


def test_offloading_frees_device_memory(gpu: RankPool, tmp_path: Path) -> None:
    """Offloading frees all of it, onloading takes no more than was freed, and nothing grows over the rounds."""
    (rounds,) = gpu.run(_offloaded, save_model(tmp_path / "model"), world_size=1)
    for found in rounds:
        assert found["present"] - found["away"] >= found["released"] > 0
        assert found["back"] - found["away"] >= found["released"]
        assert found["back"] <= found["present"]
    first, *later = ((found["away"], found["back"]) for found in rounds[1:])
    assert later == [first]
