"""A model that real ranks load from Hugging Face files and export is the same, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megarl.megatron.model_engine import ModelEngine
from megarl.megatron.parallel import GroupCache
from megarl.models import model_spec
from megarl.types import Layout, RoleName
from megarl.weights.export import export_plan, export_weights
from megarl.weights.hf_files import load_shard, read_config
from tests.megatron.compare import state_of
from tests.megatron.families import FAMILIES, MIXTURES, MODELS
from tests.megatron.test_parity import layout_id
from tests.pool import RankPool

pytestmark = pytest.mark.dist

Numbers = dict[str, list[int]]
"""Megatron's numbers of layers, from 1, by family."""


def _rewritten(rank: int, models: Mapping[str, Path], name: RoleName, layout: Layout, out: Path) -> Numbers:
    """Each model in a role of its own, which reads and writes as in a run."""
    import torch.distributed as dist

    cache, numbers = GroupCache(), {}
    for family, directory in models.items():
        spec = model_spec(read_config(directory))
        role = ModelEngine(name, spec, layout, rank, cache)
        role.load(load_shard(role.shard_map, directory, spec.manifest(role.head)))
        maps = [spec.megatron_map(layout, other, role.head) for other in range(layout.world_size)]
        tensors = spec.canonical(role.head)
        export_weights(
            out / family,
            tensors,
            export_plan(maps, tensors).senders.get(rank),
            role.model.parameters(),
            config=spec.hf_config(role.head),
            template=None,
            lead=rank == 0,
            barrier=dist.barrier,
            max_file_bytes=10_000,
        )
        numbers[family] = [layer.layer_number for chunk in role.model.chunks for layer in chunk.decoder.layers]
    return numbers


LAYOUTS = [
    Layout(tp=4),
    Layout(pp=4),
    Layout(tp=2, pp=2, sequence_parallel=True),
    Layout(tp=2, pp=2, vpp=2),
    Layout(pp=2, vpp=2, dp=2),
    Layout(tp=3),
    Layout(pp=3),
    Layout(pp=2, dp=2, ep=2),
    Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
    Layout(dp=3, ep=3),
    Layout(dp=4, ep=2),
]
NAMES = [name for name in MODELS if name not in ("plain", "tied", "qwen3_moe_renormalised")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: MODELS[name].save(tmp_path_factory.mktemp(name), dtype="bfloat16" if name == "gpt2" else "float32")
        for name in NAMES
    }


@pytest.fixture(scope="module")
def reward_models(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same bodies with a score head, written by transformers."""
    from transformers import AutoModelForSequenceClassification

    made = {}
    for name in FAMILIES:
        torch.manual_seed(1)
        made[name] = tmp_path_factory.mktemp(name)
        AutoModelForSequenceClassification.from_pretrained(models[name], num_labels=1).save_pretrained(made[name])
    return made


def _fit(models: dict[str, Path], layout: Layout) -> dict[str, Path]:
    """Those that the layout can split."""
    fitting = {name: path for name, path in models.items() if layout.tp in (1, *MODELS[name].tp)}
    return {name: path for name, path in fitting.items() if layout.ep == 1 or name in MIXTURES}


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_every_family_round_trips(pool: RankPool, models: dict[str, Path], tmp_path: Path, layout: Layout) -> None:
    fitting = _fit(models, layout)
    ranks = pool.run(_rewritten, fitting, "actor", layout, tmp_path, world_size=layout.world_size)
    _check(fitting, tmp_path)
    for name in fitting:
        stages = [ranks[rank][name] for rank in range(0, layout.world_size, layout.tp * layout.dp)]
        interleaved = sorted(number for numbers in stages for number in numbers)
        assert interleaved == list(range(1, len(interleaved) + 1)), f"{name}: Megatron numbers its layers {stages}"


@pytest.mark.parametrize("layout", LAYOUTS[2:5], ids=layout_id)
def test_every_reward_model_round_trips(
    pool: RankPool, reward_models: dict[str, Path], tmp_path: Path, layout: Layout
) -> None:
    fitting = _fit(reward_models, layout)
    pool.run(_rewritten, fitting, "reward", layout, tmp_path, world_size=layout.world_size)
    _check(fitting, tmp_path)


def _check(models: dict[str, Path], out: Path) -> None:
    """The files are many, and transformers reads the same tensors from them."""
    from safetensors.torch import load_file

    for name, directory in models.items():
        files = list((out / name).glob("*.safetensors"))
        assert len(files) > 1
        found = {tensor: values for file in files for tensor, values in load_file(file).items()}
        want = state_of(directory)
        assert found.keys() == want.keys(), name
        for tensor, values in want.items():
            assert found[tensor].dtype == values.dtype
            assert torch.equal(found[tensor], values), f"{name} {tensor}"
