"""The command: its output and exit codes, for ordinary use, mistakes and damaged files."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megarl.cli import app
from megarl.convert.cli import parse_bytes
from tests.convert.directories import assert_equal, make_directory, read_directory
from tests.weights import models

CONFIG = models.qwen3_config()


def convert(*arguments: object) -> tuple[int, str]:
    """The exit code, and everything that is printed."""
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    make_directory(tmp_path / "hf", CONFIG)
    return tmp_path / "hf"


@pytest.fixture
def ckpt(hf: Path, tmp_path: Path) -> Path:
    assert convert("import", "--hf", hf, "--out", tmp_path / "ckpt")[0] == 0
    return tmp_path / "ckpt"


def test_round_trip(hf: Path, ckpt: Path, tmp_path: Path) -> None:
    assert (ckpt / "latest_checkpointed_iteration.txt").read_text() == "release"
    code, said = convert("verify", "--hf", hf, "--checkpoint", ckpt)
    assert (code, "47 tensors are equal, bit for bit" in said) == (0, True)
    code, said = convert("export", "--checkpoint", ckpt, "--out", tmp_path / "out", "--max-file-size", "20KB")
    assert (code, f"{tmp_path / 'out'} is complete" in said) == (0, True)
    assert_equal(read_directory(tmp_path / "out"), read_directory(hf))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3


def test_a_failed_verification_is_reported(hf: Path, ckpt: Path, tmp_path: Path) -> None:
    tensors = read_directory(hf)
    tensors["model.norm.weight"][2] += 0.5
    tensors["model.layers.3.self_attn.k_proj.weight"][1:3] -= 2.0
    make_directory(tmp_path / "other", CONFIG, tensors=tensors)
    code, said = convert("verify", "--hf", tmp_path / "other", "--checkpoint", ckpt)
    assert code == 1
    keys = "model.layers.3.self_attn.k_proj.weight: 48 of 720 elements differ"
    assert f"2 of 47 tensors differ:\n  {keys}\n  model.norm.weight: 1 of 24 elements differ" in said


def test_inspect_describes_a_checkpoint(ckpt: Path) -> None:
    code, said = convert("inspect", ckpt)
    assert (code, said.startswith(f"{ckpt}/release: ")) == (0, True)
    assert "\n  decoder.layers.mlp.linear_fc1.weight  float32  [4, 80, 24]  chunks: 4\n" in said


@pytest.mark.parametrize(("text", "size"), [("512MiB", 512 << 20), ("1.5 GB", 1_500_000_000), (7, 7)])
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["1,000GB", "1.5.2", "8bit", "16GiB/2", "5GB extra", "4G", "0GB", "-1GB", "1_0"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size; write one like 512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("import --hf {tmp} --out {tmp}/x", "config.json does not exist; name a"),
        ("import --hf {tmp}/odd --out {tmp}/x", "architecture OddForCausalLM is not supported"),
        ("import --hf {tmp}/hf --out {tmp}/x --memory-budget 4gigs", "'4gigs' is not a size"),
        ("import --hf {tmp}/hf --out {tmp}/x --memory-budget 20MiB", "20.0 MiB is too small"),
        ("import --hf {tmp}/hf --out {tmp}/x --dtype int8", "'int8' is not one of"),
        ("import --hf {tmp}/hf --out .", ". exists; choose another --out"),
        ("export --checkpoint {tmp} --out {tmp}/x", "has no checkpoint: neither"),
        ("export --checkpoint {tmp}/ckpt --out {tmp}/x --role actor", "roles are of a run"),
        ("export --checkpoint {tmp}/ckpt --out {tmp}/hf", "exists; choose another --out"),
        ("inspect {tmp}/other", "release is not a checkpoint of Megatron's torch_dist format"),
        ("inspect {tmp}/ckpt --step 3", "iter_0000003 is not a checkpoint"),
    ],
)
@pytest.mark.usefixtures("ckpt")
def test_user_mistakes_are_reported(tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "odd").mkdir()
    shutil.copytree(tmp_path / "ckpt", tmp_path / "other")
    (tmp_path / "other/release/.metadata").unlink()
    (tmp_path / "odd/config.json").write_text('{"architectures": ["OddForCausalLM"]}')
    code, said = convert(*arguments.format(tmp=tmp_path).split())
    assert (code, message in said) == (2, True), said
    assert not (tmp_path / "x").exists()


def test_a_checkpoint_without_its_configuration_needs_a_template(ckpt: Path, hf: Path, tmp_path: Path) -> None:
    shutil.rmtree(ckpt / "hf")
    code, said = convert("export", "--checkpoint", ckpt, "--out", tmp_path / "out")
    assert (code, "does not say which model it is of; name a directory" in said) == (2, True)
    assert convert("export", "--checkpoint", ckpt, "--out", tmp_path / "out", "--hf", hf)[0] == 0
    assert_equal(read_directory(tmp_path / "out"), read_directory(hf))


class Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return Path.touch, (Path("/tmp/evil"),)  # type: ignore[return-value]


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        ("__0_0.distcp", _cut, "__0_0.distcp is truncated: it has "),
        ("__0_0.distcp", _zero, "__0_0.distcp is corrupted"),
        ("__objects_0.distcp", Path.unlink, "__objects_0.distcp is missing"),
        (".metadata", _cut, ".metadata is corrupted"),
        (".metadata", lambda path: path.write_bytes(pickle.dumps(Evil())), ".metadata is refused"),
    ],
)
def test_damaged_checkpoints_are_reported(
    ckpt: Path, tmp_path: Path, name: str, damage: Callable[[Path], object], message: str
) -> None:
    damage(ckpt / "release" / name)
    code, said = convert("export", "--checkpoint", ckpt, "--out", tmp_path / "out")
    assert (code, message in said) == (1, True), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "model.safetensors is corrupted"),
        (lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()), "safetensors is corrupted"),
        (Path.unlink, "has neither model.safetensors nor"),
    ],
)
def test_damaged_directories_are_reported(
    hf: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(hf / "model.safetensors")
    code, said = convert("import", "--hf", hf, "--out", tmp_path / "out")
    assert (code, message in said) == (1, True), said
    assert not (tmp_path / "out").exists()


@pytest.mark.process
@pytest.mark.parametrize("command", [["-m", "tools.checkpoint_convert"], ["tools/checkpoint_convert"]], ids=str)
def test_the_tool_is_the_same_command(command: list[str], tmp_path: Path) -> None:
    arguments = [sys.executable, *command, "inspect", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        arguments, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert (done.returncode, "has no checkpoint: neither" in done.stderr) == (2, True), done.stderr
