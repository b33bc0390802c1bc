"""Random models and run directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.config import ConfigError, load
from megarl.errors import RunError
from megarl.models import model_spec
from megarl.run.directory import RunDirectory, model_directory
from megarl.weights.hf_files import HFDirectory
from tests.config.debug import DEBUG
from tests.disk import SmallDisk


def test_a_random_model_is_determined_by_seed_and_configuration(tmp_path: Path) -> None:
    config = load(DEBUG)
    state = torch.get_rng_state()
    first = Path(model_directory(config, tmp_path / "first"))
    assert torch.equal(torch.get_rng_state(), state), "the process's random numbers moved on"
    tensors = load_file(first / "model.safetensors")
    again = load_file(Path(model_directory(config, tmp_path / "again")) / "model.safetensors")
    other = load(DEBUG, ["model.random.seed=1"])
    differs = load_file(Path(model_directory(other, tmp_path / "other")) / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    assert not torch.equal(tensors[embedding], differs[embedding])
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert json.loads((first / "config.json").read_text())["eos_token_id"] == 0
    spec = model_spec(config.model.hf_config())
    HFDirectory(first).check(spec.manifest())


@pytest.mark.process
@pytest.mark.parametrize("kib", [0, 8])
def test_a_full_disk_is_reported_for_a_random_model(kib: int, tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "disk", 64) as disk:
        disk.fill(kib)
        said = r"random model cannot be written: .*/disk/model.partial.*: No space left on device \(.* free\)"
        with pytest.raises(RunError, match=said):
            model_directory(load(DEBUG), disk.path)
        assert not (disk.path / "model").exists()


def test_an_error_without_a_file_names_the_directory_of_the_random_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no file")

    monkeypatch.setattr("megarl.run.directory.write_random_model", fails)
    with pytest.raises(RunError, match=r"random model cannot be written: .*/model\.partial: no file"):
        model_directory(load(DEBUG), tmp_path)


def test_a_given_model_is_used_in_place(tmp_path: Path) -> None:
    made = model_directory(load(DEBUG), tmp_path)
    overlong = "{name: soft_overlong, args: {max_tokens: 32, buffer_tokens: 32}}"
    rules = ["groups.train.roles.reward=null", f"reward.functions=[{overlong}]"]
    config = load(DEBUG, ["model.random=null", f"model.path={made}", *rules])
    assert model_directory(config, tmp_path / "run") == made
    assert not (tmp_path / "run").exists()


def test_an_uncreatable_directory_is_refused(tmp_path: Path) -> None:
    config = load(DEBUG, [f"run.dir={tmp_path / 'file' / 'run'}"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can be written"):
        RunDirectory(config)
