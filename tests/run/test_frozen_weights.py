"""A resume is refused when the weights of frozen roles differ from those at the start of the run."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megarl.config import ConfigError, TrainingConfig
from megarl.run.directory import RunDirectory
from megarl.run.frozen_weights import changed_files, digest_frozen_weights
from tests.config.debug import debug
from tests.run.staging import save, write_roles

MIB = 1 << 20


@pytest.fixture
def config(tmp_path: Path) -> TrainingConfig:
    """A run whose reference loads the model, in two files, and whose reward model has a checkpoint of its own."""
    fields = debug().model.hf_config()
    for name in ("model", "reward"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    save_file({"w": np.zeros(8, np.float32)}, tmp_path / "reward" / "model.safetensors")
    for shard in "ab":
        save_file({shard: np.zeros(8, np.float32)}, tmp_path / "model" / f"{shard}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    return debug(
        f"run.dir={tmp_path / 'run'}",
        "model.random=null",
        f"model.path={tmp_path / 'model'}",
        f"reward.path={tmp_path / 'reward'}",
    )


def exchange(file: Path) -> None:
    """Other values of the same shapes."""
    save_file({file.stem if file.stem in "ab" else "w": np.ones(8, np.float32)}, file)


def test_teachers_are_compared_by_their_fields(config: TrainingConfig, tmp_path: Path) -> None:
    teachers = json.dumps({"math": str(tmp_path / "reward"), "code": str(tmp_path / "model")})
    prompts = ["data.random=null", "data.prompts=configs/debug/data/prompts.jsonl"]
    taught = debug(*prompts, f"reference={{column: kind, teachers: {teachers}}}")
    kept = digest_frozen_weights(taught)
    exchange(tmp_path / "reward" / "model.safetensors")
    assert [*changed_files(kept, digest_frozen_weights(taught))] == ["reference.teachers.math"]


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("reward/model.safetensors", "reward.path"),
        ("model/b.safetensors", "model.path"),
        ("reward/config.json", "reward.path"),
    ],
)
def test_replaced_weights_are_refused(config: TrainingConfig, tmp_path: Path, file: str, field: str) -> None:
    with closing(RunDirectory(config)) as directory:
        save(directory, 1)
    before = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(before + b"\n")
    with pytest.raises(ConfigError) as refusal:
        RunDirectory(config)
    (problem,) = refusal.value.problems
    assert (problem.field, problem.value) == (field, str((tmp_path / file).parent))
    assert Path(file).name in problem.rule
    assert "restore these files" in problem.fix
    (tmp_path / file).write_bytes(before)
    with closing(RunDirectory(config)) as directory:
        assert directory.latest is not None
        assert directory.latest.state["version"] == 1


def test_the_digests_are_taken_at_the_start(config: TrainingConfig, tmp_path: Path) -> None:
    """Files that are replaced while the run has them loaded are detected, too."""
    with closing(RunDirectory(config)) as directory:
        exchange(tmp_path / "reward" / "model.safetensors")
        save(directory, 1)
    with pytest.raises(ConfigError, match=r"reward\.path"):
        RunDirectory(config)


def test_a_restarted_run_may_have_other_weights(config: TrainingConfig, tmp_path: Path) -> None:
    RunDirectory(config).close()
    exchange(tmp_path / "reward" / "model.safetensors")
    RunDirectory(config).close()


def test_checkpoints_without_digests_are_resumed(config: TrainingConfig) -> None:
    with closing(RunDirectory(config)) as directory:
        directory.checkpoints.commit(1, write_roles(directory.checkpoints.stage(1)), {})
    RunDirectory(config).close()


@pytest.mark.parametrize("changed", [slice(9, 10), slice(-1, None), slice(12345, None, 4 * 50_000), None])
def test_a_large_file_is_read_in_parts(config: TrainingConfig, tmp_path: Path, changed: slice | None) -> None:
    """A change in its header, in its last byte, and in one value of fifty thousand is noticed; and another size."""
    file = tmp_path / "reward" / "model.safetensors"
    save_file({"w": np.arange(10 * MIB, dtype=np.float32)}, file)
    before = digest_frozen_weights(config)
    content = bytearray(file.read_bytes())
    assert len(content) > 40 * MIB
    if changed is None:
        content.append(0)
    else:
        content[changed] = bytes(value ^ 1 for value in content[changed])
    file.write_bytes(content)
    assert changed_files(before, digest_frozen_weights(config)) == {"reward.path": ["model.safetensors"]}


def test_random_models_have_no_files(tmp_path: Path) -> None:
    assert digest_frozen_weights(debug(f"run.dir={tmp_path}")) == {}
