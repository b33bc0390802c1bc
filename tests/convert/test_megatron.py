"""Import and export against Megatron's sharded state: it loads an import and saves what export reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.convert.exporting import export_checkpoint
from megarl.convert.importing import import_checkpoint
from megarl.types import Layout
from tests.convert import jobs, megatron_lm
from tests.convert.directories import Tensors, assert_equal, make_directory, read_directory
from tests.pool import RankPool
from tests.weights import models

pytestmark = pytest.mark.dist

ALONE = Layout()

# Vocabularies are prime, KV heads 1, 2, 3 and 4, layers uneven over the stages.
CASES = {
    "llama": (models.llama_config(), [ALONE, Layout(tp=2, pp=2)]),
    "qwen2": (models.qwen2_config(dtype="bfloat16", num_hidden_layers=5), [Layout(pp=2, vpp=2), Layout(tp=4)]),
    "mistral": (models.mistral_config(tie_word_embeddings=True, num_hidden_layers=3), [Layout(tp=2, pp=2)]),
    "qwen3": (models.qwen3_config(tie_word_embeddings=True, intermediate_size=48), [Layout(tp=3), Layout(pp=4)]),
    "phi3": (models.phi3_config(), [Layout(tp=2, pp=2)]),
    "gpt2": (models.gpt2_config(num_hidden_layers=3, n_layer=3), [Layout(tp=2, dp=2), Layout(pp=3)]),
    "mixtral": (models.mixtral_config(), [Layout(tp=1, pp=1, dp=3, ep=3), Layout(tp=2, sequence_parallel=True)]),
    "qwen3_moe": (
        models.qwen3_moe_config(num_hidden_layers=3),
        [Layout(pp=2, dp=2, ep=2), Layout(tp=2, dp=2, ep=2, sequence_parallel=True)],
    ),
    "qwen2_moe": (models.qwen2_moe_config(num_hidden_layers=3), [Layout(pp=2, dp=2, ep=2)]),
    "glm4_moe": (models.glm4_moe_config(dtype="bfloat16"), [Layout(pp=2, dp=2, ep=2)]),
    "glm4_moe_lite": (models.glm4_moe_lite_config(dtype="bfloat16"), [Layout(pp=2, vpp=2)]),
    "deepseek_v3": (models.deepseek_v3_config(dtype="bfloat16"), [Layout(pp=2, dp=2, ep=2)]),
    "qwen3_next": (models.qwen3_next_config(dtype="bfloat16"), [Layout(tp=2, dp=2, ep=2, sequence_parallel=True)]),
    "gemma3": (models.gemma3_config(), [Layout(tp=2, pp=2), Layout(pp=2, vpp=2)]),
    "several_kinds": (models.CONFIGS["several_kinds"](), [Layout(pp=2, dp=2, ep=2)]),
    "qwen3_5": (models.qwen3_5_config(dtype="bfloat16"), [Layout(tp=2, pp=2), Layout(pp=2, vpp=2)]),
}
EACH = [
    pytest.param(name, layout, id=f"{name}-{i}")
    for name, (_, layouts) in CASES.items()
    for i, layout in enumerate(layouts)
]


@pytest.mark.parametrize(("family", "layout"), EACH)
def test_megatron_loads_an_import(family: str, layout: Layout, tmp_path: Path, pool: RankPool) -> None:
    config: dict[str, Any] = CASES[family][0]
    make_directory(tmp_path / "hf", config)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    pool.run(
        jobs.load, config, layout, str(tmp_path / "ckpt/release"), str(tmp_path / "hf"), world_size=layout.world_size
    )


@pytest.mark.parametrize(("family", "layout"), EACH)
def test_export_reads_what_megatron_saves(family: str, layout: Layout, tmp_path: Path, pool: RankPool) -> None:
    config: dict[str, Any] = CASES[family][0]
    tensors = make_directory(tmp_path / "hf", config)
    _save(pool, config, layout, tmp_path, {})
    _export(tmp_path, tensors)


LM = models.llama_config(num_hidden_layers=2, num_key_value_heads=2)


@pytest.mark.parametrize("sharding", ["dp_reshardable", "fully_reshardable"])
def test_export_reads_what_megatron_lm_saves(sharding: str, tmp_path: Path, pool: RankPool) -> None:
    """With its optimizer's state, its arguments and the state of its random generators."""
    make_directory(tmp_path / "hf", LM)
    directory = tmp_path / "ckpt/iter_0000007"
    expected = pool.run(megatron_lm.save, LM, str(directory), sharding, world_size=2)[0]
    (tmp_path / "ckpt/latest_checkpointed_iteration.txt").write_text("7")
    _export(tmp_path, expected)


def test_megatron_lm_loads_an_import(tmp_path: Path, pool: RankPool) -> None:
    tensors = make_directory(tmp_path / "hf", LM)
    import_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    for loaded in pool.run(megatron_lm.load, LM, str(tmp_path / "ckpt/release"), world_size=2):
        assert_equal(loaded, tensors)


@pytest.mark.parametrize("metadata", [{"non_homogeneous_layers": True}, {"singleton_local_shards": True}], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gemma3", "several_kinds"])
def test_export_reads_one_tensor_per_layer(
    family: str, metadata: dict[str, Any], tmp_path: Path, pool: RankPool
) -> None:
    config: dict[str, Any] = CASES[family][0]
    tensors = make_directory(tmp_path / "hf", config)
    _save(pool, config, Layout(tp=2, sequence_parallel=True), tmp_path, metadata)
    _export(tmp_path, tensors)


def _save(pool: RankPool, config: dict[str, Any], layout: Layout, tmp_path: Path, metadata: dict[str, Any]) -> None:
    directory = tmp_path / "ckpt/iter_0000007"
    pool.run(jobs.save, config, layout, str(directory), str(tmp_path / "hf"), metadata, world_size=layout.world_size)
    (tmp_path / "ckpt/latest_checkpointed_iteration.txt").write_text("7")


def _export(tmp_path: Path, tensors: Tensors) -> None:
    export_checkpoint(tmp_path / "ckpt", tmp_path / "out", template=tmp_path / "hf")
    assert_equal(read_directory(tmp_path / "out"), tensors)
