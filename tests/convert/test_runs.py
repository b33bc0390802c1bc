"""Checkpoints of runs, converted to Hugging Face directories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import load
from megarl.config import save as save_config
from megarl.convert.exporting import compare, export_checkpoint
from megarl.errors import UsageError
from megarl.run.checkpoints import BrokenCheckpointError, Checkpoints
from megarl.types import Layout, RoleName
from tests.config.debug import DEBUG
from tests.convert.directories import assert_equal, read_directory
from tests.convert.test_cli import convert
from tests.megatron.tiny import save_model
from tests.megatron.training import make_roles, save
from tests.pool import RankPool

pytestmark = pytest.mark.dist

LAYOUTS: Mapping[RoleName, Layout] = {"actor": Layout(tp=2, pp=2), "critic": Layout(dp=2, pp=2)}


def _saved(rank: int, models: dict[RoleName, Path], out: Path) -> dict[str, Any]:
    return {name: save(role, out / name) for name, role in make_roles(rank, models, LAYOUTS, torch.bfloat16).items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """The directory of a run with one checkpoint; its model is beside it."""
    directory = tmp_path_factory.mktemp("convert") / "run"
    model = save_model(directory.parent / "model", "qwen2", 0, dtype="bfloat16", tie_word_embeddings=True)
    (model / "tokenizer.json").write_text("{}")
    checkpoints = Checkpoints(directory / "checkpoints")
    ranks = pool.run(_saved, dict.fromkeys(LAYOUTS, model), checkpoints.stage(4), world_size=4)
    checkpoints.commit(4, {name: [rank[name] for rank in ranks] for name in LAYOUTS}, state={})
    config = load(DEBUG.with_stem("sft"), ["model.random=null", f"model.path={model}"])
    save_config(config, directory / "config.yaml")
    return directory


def test_an_exported_actor_equals_the_model_it_was_loaded_from(run: Path, tmp_path: Path) -> None:
    export_checkpoint(run, tmp_path / "out")
    expected = {name: tensor.bfloat16() for name, tensor in read_directory(run.parent / "model").items()}
    assert_equal(read_directory(tmp_path / "out"), expected)
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert compare(tmp_path / "out", run) == (len(expected), [])


def test_an_exported_critic_has_its_head(run: Path, tmp_path: Path) -> None:
    export_checkpoint(run, tmp_path / "out", role="critic", step=4)
    found = read_directory(tmp_path / "out")
    expected = {name: tensor.bfloat16() for name, tensor in read_directory(run.parent / "model").items()}
    expected["score.weight"] = torch.linspace(-1, 1, 32).view(1, 32).bfloat16()
    assert_equal(found, expected)
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["Qwen2ForSequenceClassification"]
    with pytest.raises(UsageError, match="has the head 'score', the actor 'lm'; choose another --role"):
        compare(tmp_path / "out", run)


def test_inspect_describes_a_run(run: Path) -> None:
    code, said = convert("inspect", run)
    assert (code, said.startswith(f"{run}/checkpoints/step-4/actor: ")) == (0, True)
    assert "\n  weight.model.norm.weight  bfloat16  [32]  chunks: " in said
    assert "step-4/critic: " in convert("inspect", run / "checkpoints/step-4/critic")[1]


def test_damaged_files_of_a_role_are_named(run: Path, tmp_path: Path) -> None:
    path = run / "checkpoints/step-4/actor/__3_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        with pytest.raises(BrokenCheckpointError, match=r"actor/__3_0.distcp of actor rank 3 has other content"):
            export_checkpoint(run, tmp_path / "out")
        export_checkpoint(run, tmp_path / "critic", role="critic")
    finally:
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (".", {"step": 5}, "no checkpoint of step 5; there are 4"),
        (".", {"role": "reward"}, "no reward; choose --role actor or critic"),
        ("checkpoints/step-4", {"step": 4}, "--step 4 has no meaning"),
        ("checkpoints/step-4/actor", {"role": "actor"}, "--role actor has no meaning"),
        ("checkpoints", {}, "has no checkpoint: neither Megatron-LM's"),
    ],
)
def test_missing_checkpoints_and_roles_are_reported(
    run: Path, tmp_path: Path, path: str, options: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        export_checkpoint(run / path, tmp_path / "out", **options)


def test_a_run_that_has_lost_its_model_needs_a_template(run: Path, tmp_path: Path) -> None:
    config = run / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace(str(run.parent / "model"), str(tmp_path / "gone")))
    try:
        with pytest.raises(UsageError, match="name a directory that has it with --hf"):
            export_checkpoint(run, tmp_path / "out")
        export_checkpoint(run, tmp_path / "out", template=run.parent / "model")
    finally:
        config.write_text(text)
