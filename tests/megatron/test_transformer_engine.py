"""Layers with Transformer Engine's parameters, as torch's modules: names, checkpoints, and which models take them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megarl.errors import RunError
from megarl.megatron.model import _require_agreement
from megarl.megatron.platform import kernels
from megarl.models.dims import Dims
from megarl.types import Layout
from tests.megatron.stand_ins import transformer_engine
from tests.megatron.tiny import save_model
from tests.megatron.training import canonical, make_roles, restore, save, snapshot, train
from tests.pool import RankPool


def exchanged(
    rank: int, directory: Path, layout: Layout, dtype: torch.dtype, out: Path, stand_ins: bool
) -> dict[str, Any]:
    """Two steps of both kinds of layers; then a checkpoint of each, read by the other kind."""

    def role(layers: str) -> Any:
        return make_roles(rank, {"actor": directory}, {"actor": layout}, dtype, layers)["actor"]

    with transformer_engine() if stand_ins else nullcontext():
        roles = {layers: role(layers) for layers in ("local", "transformer_engine")}
        others = {layers: role(layers) for layers in roles}
        steps = {layers: train(trained, 0, 2) for layers, trained in roles.items()}
        for layers, trained in roles.items():
            save(trained, out / layers)
        for layers, other in zip(roles, reversed(others.values()), strict=True):
            train(other, 5, 1)  # the replaced state is not a fresh one
            restore(other, out / layers)
    names = {layers: [name for name, _ in one.model.chunks[0].named_parameters()] for layers, one in roles.items()}
    return {
        "names": names,
        "steps": steps,
        "saved": {layers: snapshot(one) for layers, one in roles.items()},
        "read": {layers: snapshot(one) for layers, one in zip(roles, reversed(others.values()), strict=True)},
    }


def check_exchange(results: list[dict[str, Any]]) -> None:
    """Each kind of layers has its own names, and reads from the other's checkpoint what that has, bit for bit."""
    for layers, own in (("local", "input_layernorm.weight"), ("transformer_engine", "linear_qkv.layer_norm_weight")):
        found = [{name for name in result["names"][layers] if "norm" in name and ".0." in name} for result in results]
        assert all(any(name.endswith(own) for name in names) for names in found), found
        saved, read = (canonical([result[what][layers] for result in results]) for what in ("saved", "read"))
        assert saved.keys() == read.keys()
        assert [name for name, values in saved.items() if not torch.equal(values, read[name])] == []


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_checkpoints_of_both_kinds_of_layers_are_the_same(pool: RankPool, tmp_path: Path, kind: str) -> None:
    """gpt2 has biases of norms, and qwen3 norms of heads."""
    directory, layout = save_model(tmp_path / "model", kind), Layout(tp=2, sequence_parallel=True)
    (tmp_path / "out").mkdir()
    results = pool.run(exchanged, directory, layout, torch.float32, tmp_path / "out", True, world_size=2)
    check_exchange(results)
    for result in results:
        fused, local = (result["steps"][layers] for layers in ("transformer_engine", "local"))
        for got, want in zip(fused, local, strict=True):
            assert got == pytest.approx(want, rel=1e-6)  # gradients add up in another order in the norm of all


DIMS = Dims(vocab=100, hidden=256, ffn=512, layers=2, heads=4, kv_heads=2, head_dim=64, positions=64)


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({"head_dim": 20}, "bfloat16", "heads of 20"),
        ({"head_dim": 256}, "bfloat16", "heads of 256"),
        ({"experts": 4}, "bfloat16", "experts"),
        ({}, "float32", "products of float32"),
    ],
)
def test_a_model_that_transformer_engine_cannot_compute_keeps_local_layers(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], dtype: str, reason: str
) -> None:
    monkeypatch.setattr(kernels, "device_refusals", lambda device: [] if device == "cuda" else ["needs CUDA"])
    dims = Dims(**{**vars(DIMS), **changes})
    assert kernels.layer_kind("auto", DIMS, (), "bfloat16", "cuda") == "transformer_engine"
    assert kernels.layer_kind("auto", dims, (), dtype, "cuda") == "local"
    with pytest.raises(ValueError, match=f"^model.layers: .*{reason}"):
        kernels.layer_kind("transformer_engine", dims, (), dtype, "cuda")


@pytest.fixture
def unknown() -> Iterator[None]:
    """What is known of Transformer Engine is forgotten, before and after."""
    kernels.transformer_engine_failure.cache_clear()
    yield
    kernels.transformer_engine_failure.cache_clear()


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_without_packed_attention_has_local_layers(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A CPU, and a GPU of another capability than cuDNN's attention needs."""
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("transformer_engine.pytorch"))
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    for capability, kind in (((8, 0), "local"), ((9, 0), "transformer_engine"), ((10, 0), "transformer_engine")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        expected = kind if device == "cuda" else "local"
        assert kernels.layer_kind("auto", DIMS, (), "bfloat16", device) == expected
    assert kernels.layer_kind("local", DIMS, (), "bfloat16", device) == "local"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match=r"needs a CUDA device|needs 9\.0"):
        kernels.layer_kind("transformer_engine", DIMS, (), "bfloat16", device)


_START = """
import torch

torch.cuda.is_available = lambda: True
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_capability = lambda: (9, 0)
from megarl.megatron.platform import start_platform

start_platform("{kind}")
import megarl.megatron.model_engine
from megarl.megatron.platform.kernels import layer_kind
from megarl.models.dims import Dims
from megatron.core.extensions.transformer_engine import HAVE_TE

assert not HAVE_TE
dims = Dims(vocab=100, hidden=256, ffn=512, layers=2, heads=4, kv_heads=2, head_dim=64, positions=64)
assert layer_kind("auto", dims, (), "bfloat16", "cuda") == "local"
try:
    layer_kind("transformer_engine", dims, (), "bfloat16", "cuda")
except ValueError as error:
    print(error)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("cpu", "OSError"),
        ("cuda", "AssertionError"),
        *(
            pytest.param("cuda", other, marks=pytest.mark.matrix)
            for other in ("OSError", "RuntimeError", "ImportError")
        ),
    ],
)
def test_megatron_starts_beside_a_broken_transformer_engine(tmp_path: Path, kind: str, error: str) -> None:
    broken = tmp_path / "transformer_engine"
    (broken / "pytorch").mkdir(parents=True)
    (broken / "__init__.py").write_text("")
    (broken / "pytorch" / "__init__.py").write_text(f"raise {error}('libtransformer_engine.so')")
    done = subprocess.run(
        [sys.executable, "-c", _START.format(kind=kind)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}", "TORCH_COMPILE_DISABLE": "1"},
        check=False,
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"({error}: libtransformer_engine.so)" in done.stdout


def _choose(rank: int) -> str:
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    _require_agreement("local", dist.group.WORLD)
    try:
        _require_agreement("local" if rank else "transformer_engine", dist.group.WORLD)
    except RunError as error:
        return str(error)
    return "agreed"


@pytest.mark.dist
def test_ranks_with_different_layers_are_refused_on_all_of_them(pool: RankPool) -> None:
    first, second = pool.run(_choose, world_size=2)
    assert first == second
    assert "rank 0: transformer_engine, rank 1: local" in first
