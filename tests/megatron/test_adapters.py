"""Adapters against PEFT and transformers, and merged matrices against sums by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import megarl.megatron.lora_layers as adapters_module
from megarl.data.schedule import inference_schedule
from megarl.megatron.lora_layers import MergedMatrix, initial_adapters, merged_weights
from megarl.megatron.parallel import GroupCache
from megarl.megatron.worker import Offloader
from megarl.models.lora import Adapters, adapter_tensors
from megarl.types import Layout
from tests.megatron.compare import check_against, check_gradients, state_of, weights_of
from tests.megatron.families import MODELS
from tests.megatron.samples import random_chunks
from tests.megatron.supervised import naive_steps, two_steps
from tests.megatron.test_parity import case_id
from tests.megatron.tiny import load_role, local_parts, random_head, save_adapters, spec_of
from tests.megatron.training import Snapshot, canonical, make_roles, restore, save, snapshot, train
from tests.needs import lacking
from tests.oracle.merged import Merged
from tests.pool import RankPool

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
SP2 = Layout(tp=2, sequence_parallel=True)
MODELS_OF_PEFT = {
    # targets, and the losses
    "tied": (None, ("sft", "dpo", "pairwise")),
    "gpt2": (None, ("sft",)),
    "phi3": (("qkv_proj", "down_proj"), ("sft",)),
    "qwen3": (("q_proj", "v_proj", "up_proj"), ("sft",)),
    "gemma3": (None, ("sft",)),
    "deepseek_v2": (("q_proj", "kv_a_proj_with_mqa", "kv_b_proj"), ("sft",)),
    "glm4_moe_lite": (("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), ("sft",)),
    "qwen3_5": (None, ("sft",)),
}
LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), SP2]
CASES = [
    *(("tied", "sft", layout) for layout in LAYOUTS),
    *(("tied", loss, layout) for loss in ("dpo", "pairwise") for layout in (Layout(pp=2, vpp=2), Layout(tp=4))),
    ("tied", "pairwise", Layout(dp=2)),
    *((name, "sft", layout) for name in ("gpt2", "phi3", "glm4_moe_lite", "qwen3_5") for layout in (Layout(), SP2)),
    ("qwen3", "sft", Layout(tp=2)),
    ("deepseek_v2", "sft", SP2),
    ("gemma3", "sft", Layout(tp=2, pp=2, sequence_parallel=True)),
]


def adapters_of(name: str) -> Adapters:
    return Adapters(rank=3, scale=2.5, targets=MODELS_OF_PEFT[name][0])


@pytest.fixture(scope="module")
def of_peft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models, adapters, and what PEFT made of them."""
    packages = list((ROOT / ".venv-trl/lib").glob("python3*/site-packages"))
    if not packages:
        lacking("make trl installs PEFT")
    directory = tmp_path_factory.mktemp("peft")
    for name, (_, losses) in MODELS_OF_PEFT.items():
        model = MODELS[name].save(directory / name)
        tensors = save_adapters(spec_of(model), adapters_of(name), directory / f"{name}-adapters")
        torch.save(tensors, directory / f"{name}.start")
        for loss in losses:
            (directory / f"{name}-{loss}.case").write_text(f"{model}\n{loss}\n{directory / name}-adapters")
    done = subprocess.run(
        [sys.executable, "-m", "tests.oracle.peft_steps", str(directory)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, packages)]), "HF_HUB_OFFLINE": "1"},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.parametrize(("name", "loss", "layout"), CASES, ids=case_id)
def test_steps_equal_those_of_peft(pool: RankPool, of_peft: Path, name: str, loss: str, layout: Layout) -> None:
    outcome = torch.load(of_peft / f"{name}-{loss}.outcome", weights_only=False)
    start = torch.load(of_peft / f"{name}.start")
    recompute = "full" if layout.pp > 1 else "selective" if layout.tp > 1 else "none"
    arguments = (of_peft / name, loss, layout, 40, (adapters_of(name), start), recompute)
    results = pool.run(two_steps, *arguments, world_size=layout.world_size)
    if loss == "pairwise":
        start = {**start, "score.weight": random_head(of_peft / name)}
    check_against([rank for _, rank in results], outcome["steps"], outcome["weights"], start)


@pytest.mark.parametrize("layout", LAYOUTS, ids=case_id)
def test_gradients_equal_those_of_peft(pool: RankPool, of_peft: Path, layout: Layout) -> None:
    moved = torch.load(of_peft / "tied-sft.outcome", weights_only=False)["moved"]
    start = torch.load(of_peft / "tied.start")
    arguments = (of_peft / "tied", "sft", layout, 40, (adapters_of("tied"), start))
    results = pool.run(partial(two_steps, gradients=True), *arguments, world_size=layout.world_size)
    check_gradients([rank for _, rank in results], moved, start)


EXPERTS = [
    ("qwen3_moe", Layout()),
    ("qwen3_moe", Layout(dp=2, ep=2)),
    ("qwen3_moe", Layout(tp=2, sequence_parallel=True, dp=2, ep=2)),
    ("qwen2_moe", Layout(dp=2, ep=2, pp=2)),
    ("deepseek_v3", Layout(tp=2, sequence_parallel=True, pp=2)),
    ("qwen3_5", Layout(pp=4)),
]
STAGES_WITHOUT = {"qwen3_5": ("q_proj",)}
"""Targets that every other layer, which is a stage, does not have."""


@pytest.mark.parametrize(("name", "layout"), EXPERTS, ids=case_id)
def test_steps_equal_those_of_merged_matrices(pool: RankPool, tmp_path: Path, name: str, layout: Layout) -> None:
    adapters = Adapters(rank=2, scale=2.5, targets=STAGES_WITHOUT.get(name))
    model = MODELS[name].save(tmp_path / "model")
    start = save_adapters(spec_of(model), adapters, tmp_path / "adapters")
    for gradients in (False, True):
        steps, trained = naive_steps(
            model, "sft", lambda base: Merged(base, start, adapters.scale), gradients=gradients
        )
        weights = {}
        for parameter, value in trained.named_parameters():
            if value.requires_grad:
                weights[parameter.replace("|", ".")] = value.detach()
        arguments = (model, "sft", layout, 40, (adapters, start))
        job = partial(two_steps, gradients=gradients)
        ranks = [rank for _, rank in pool.run(job, *arguments, world_size=layout.world_size)]
        if gradients:
            check_gradients(ranks, weights, start)
        else:
            check_against(ranks, steps, weights, start)


def _passes(rank: int, directory: Path, layout: Layout, tensors: Any) -> list[Any]:
    """Log-probabilities of a model alone, with new adapters, and with some that are switched off and then on."""
    rollouts, infos = random_chunks()
    cache = GroupCache()
    found = []
    adapters = Adapters(rank=3, scale=2.5)
    for own in (None, adapters):
        role = load_role(directory, "actor", layout, rank, cache, trainable=True, adapters=own)
        schedule = inference_schedule(infos, layout, 40).ranks[role.coords.dp]
        if own is not None:
            shard_map = role.saved_map(rank)
            named = adapter_tensors(role.spec, adapters)
            role.load_adapters(initial_adapters(shard_map, named, gaussian=False, seed=3))
        found.append(role.logprobs(schedule, rollouts, 1.0))
    role.load_adapters(local_parts(role.saved_map(rank), tensors))
    with role.adapters_as(on=False):
        found.append(role.logprobs(schedule, rollouts, 1.0))
    return [*found, role.logprobs(schedule, rollouts, 1.0)]


@pytest.mark.parametrize("layout", [Layout(), SP2], ids=case_id)
def test_adapters_of_zeros_and_those_switched_off_change_no_bit(pool: RankPool, tmp_path: Path, layout: Layout) -> None:
    model = MODELS["tied"].save(tmp_path / "model")
    tensors = save_adapters(spec_of(model), Adapters(rank=3, scale=2.5), tmp_path / "adapters")
    for alone, new, off, on in pool.run(_passes, model, layout, tensors, world_size=layout.world_size):
        if alone is not None:
            assert np.array_equal(alone, new)
            assert np.array_equal(alone, off)
            assert np.abs(alone - on).max() > 0.01


def _merged(rank: int, directory: Path, layout: Layout, tensors: Any) -> list[Any]:
    """The merged matrices by shards of canonical ones; parts of them have the bits of the whole."""
    adapters = Adapters(rank=3, scale=2.5, targets=("k_proj", "o_proj", "gate_proj", "down_proj", "in_proj_z"))
    role = load_role(directory, "actor", layout, rank, trainable=True, adapters=adapters)
    role.load_adapters(local_parts(role.saved_map(rank), tensors))
    weights = merged_weights(role.model)
    found = []
    for shard in role.shard_map.shards:
        weight = weights[shard.param]
        if isinstance(weight, MergedMatrix):
            with mock.patch.object(adapters_module, "_ROWS", 5):
                box = weight[shard.box.slices]
                for part in shard.box.split(37):
                    assert torch.equal(weight[part.slices], box[part.relative_to(shard.box).slices])
            found.append((shard.name, shard.region.slices, box.reshape(shard.region.shape)))
    return found


@pytest.mark.parametrize("name", ["tied", "qwen3_moe", "qwen3_5"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2)], ids=case_id)
def test_merged_matrices_are_the_base_and_the_product(
    pool: RankPool, tmp_path: Path, name: str, layout: Layout
) -> None:
    adapters = Adapters(rank=3, scale=2.5)
    model = MODELS[name].save(tmp_path / "model")
    tensors = save_adapters(spec_of(model), adapters, tmp_path / "adapters")
    base = state_of(model)
    targets = "k_proj", "o_proj", "gate_proj", "down_proj", "in_proj_z"
    seen = set()
    for rank in pool.run(_merged, model, layout, tensors, world_size=layout.world_size):
        for tensor, region, values in rank:
            module = tensor.removesuffix(".weight")
            want = base[tensor].double()
            if module.rpartition(".")[2] in targets:
                a, b = (tensors[f"{module}.lora_{side}.weight"].double() for side in "AB")
                want = want + 2.5 * b @ a
                seen.add(module.rpartition(".")[2])
            assert (values - want[region]).abs().max() < 1e-6, tensor
    assert seen == {target for target in targets if any(f".{target}." in key for key in base)}


def _resumed(rank: int, models: Any, saving: Layout, loading: Layout, name: Any, out: Path) -> list[Snapshot]:
    """The state after three steps at a stretch, at a checkpoint after two, and of it in another layout, on to three."""
    adapters = Adapters(rank=2, scale=2.0, targets=("q_proj", "o_proj", "up_proj", "down_proj"))
    found = []
    if rank < saving.world_size:
        role = make_roles(rank, models, {name: saving}, torch.bfloat16, adapters=adapters)[name]
        train(role, 0, 2)
        save(role, out)
        found.append(snapshot(role))
        train(role, 2, 1)
        found.append(snapshot(role))
    role = make_roles(rank, models, {name: loading}, torch.bfloat16, adapters=adapters)[name]
    train(role, 7, 1)  # the replaced state is not a fresh one
    restore(role, out)
    found.append(snapshot(role))
    train(role, 2, 1)
    return [*found, snapshot(role)]


@pytest.mark.parametrize(
    ("kind", "name", "saving", "loading"),
    [
        ("tied", "actor", SP2, SP2),
        ("tied", "critic", Layout(tp=2, pp=2), Layout(pp=2, dp=2)),
        ("qwen3_moe", "actor", Layout(dp=2, ep=2, pp=2), Layout(tp=2, sequence_parallel=True, dp=2)),
    ],
    ids=case_id,
)
def test_checkpoints_hold_adapters_alone_and_resume_in_every_layout(
    pool: RankPool, tmp_path: Path, kind: str, name: Any, saving: Layout, loading: Layout
) -> None:
    model = MODELS[kind].save(tmp_path / "model", dtype="bfloat16")
    out = tmp_path / "saved"
    results = pool.run(_resumed, {name: model}, saving, loading, name, out, world_size=saving.world_size)
    saved, straight, restored, resumed = map(canonical, zip(*results, strict=True))
    assert saved.keys() == restored.keys()
    for key, value in saved.items():
        assert torch.equal(value, restored[key]), key
    if saving == loading:
        assert all(torch.equal(value, resumed[key]) for key, value in straight.items())
    stored = FileSystemReader(out).read_metadata().state_dict_metadata
    kinds = {key.partition(".")[0] for key in stored}
    averages = {"average"} if name == "actor" else set()
    others = {key.partition(".")[2] for key in stored if ".lora_" not in key}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq", "master"} | averages
    assert others == ({"score.weight"} if name == "critic" else set())


def _critics(rank: int, directory: Path, layout: Layout) -> list[Any]:
    """Values of a critic with the actor's weights, which take turns on the device, and of another, before each step."""
    adapters = Adapters(rank=2, scale=2.0)
    models: dict[Any, Path] = {"actor": directory, "critic": directory}
    roles: dict[str, Any] = dict(
        make_roles(rank, models, dict.fromkeys(models, layout), torch.float32, adapters=adapters)
    )
    other = make_roles(rank, models, {"critic": layout}, torch.float32, adapters=adapters)["critic"]
    bytes_of_both = sum(value.nbytes for role in roles.values() for value in weights_of(role).values())
    roles["critic"].share_base(roles["actor"])
    offloader = Offloader(roles, ["actor", "critic"], above=["critic"])
    rollouts, infos = random_chunks()
    schedule = inference_schedule(infos, layout, 40).ranks[roles["critic"].coords.dp]
    found = []
    for step in range(2):
        train(offloader.onload("actor"), step, 1)
        critic = offloader.onload("critic")
        found.append((critic.values(schedule, rollouts), other.values(schedule, rollouts)))
        assert train(critic, step, 1) == train(other, step, 1)
        offloader.offload_all()
    offloader.onload("critic")
    held = {}
    for role in roles.values():
        for value in (*role._part("frozen"), *role._part("trained")):
            held[value.untyped_storage().data_ptr()] = value.nbytes
    assert sum(held.values()) < 0.7 * bytes_of_both
    return found


@pytest.mark.parametrize("layout", [Layout(pp=2), SP2], ids=case_id)
def test_a_critic_on_the_actors_weights_equals_one_with_its_own(pool: RankPool, tmp_path: Path, layout: Layout) -> None:
    model = MODELS["tied"].save(tmp_path / "model")
    for steps in pool.run(_critics, model, layout, world_size=layout.world_size):
        for shared, own in steps:
            assert (shared is None) == (own is None)
            for chunk, rows in (own or {}).items():
                assert all(np.array_equal(row, shared[chunk][index]) for index, row in enumerate(rows))
