"""The environment and the files of an engine's process."""

from __future__ import annotations

import json
import os
import tempfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.schema import Rollout
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.engine_options import EngineOptions
from megarl.rollout.vllm_environment import scratch_directory, set_vllm_environment, vllm_device
from tests.config.debug import debug

ROOM = 107 - 37


@pytest.mark.parametrize("length", [10, 45, 46, 90])
def test_vllm_socket_paths_are_short_enough(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="") as short:
        usual = Path(short, "t" * max(length - len(short) - 1, 0))
        usual.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(usual))
        with scratch_directory() as directory:
            assert len(directory) <= ROOM
            assert (Path(directory).parent == usual) == (len(str(usual)) <= 45)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", {"TORCHINDUCTOR_CACHE_DIR": "/tmp/engine", "OMP_NUM_THREADS": "3"}),  # not those of the shell
        ("cuda", {"TRITON_F32_DEFAULT": "ieee", "OMP_NUM_THREADS": "8"}),  # what is compiled outlives the engine
    ],
)
def test_variables(device: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "8"})
    set_vllm_environment(device, "/tmp/engine", 3)
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_F32_DEFAULT", "OMP_NUM_THREADS")
    assert {name: os.environ[name] for name in names if name in os.environ} == expected
    assert os.environ["VLLM_RPC_BASE_PATH"] == "/tmp/engine"


@pytest.mark.parametrize(("version", "device"), [("0.32.0", "cuda"), ("0.32.0+cpu", "cpu")])
def test_the_build_of_vllm(version: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm_device() == "cpu"
    monkeypatch.setattr(metadata, "version", lambda _: version)
    assert vllm_device() == device


def test_packages_that_change_what_every_engine_samples_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before vLLM is imported, which would load them without a word."""
    directory = tmp_path / "steering-1.0.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: steering\nVersion: 1.0\n")
    (directory / "entry_points.txt").write_text("[vllm.logits_processors]\nbias = steering.vllm:Bias\n")
    (tmp_path / "config.json").write_text(json.dumps(debug().model.hf_config()))
    rollout = Rollout(devices="0", max_new_tokens=4, max_model_len=8)
    options = EngineOptions(vocab_size=8, device="cpu")
    engine: Any = RolloutEngine(tmp_path, rollout, options, engine_id=0)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ValueError, match=r"^steering adds the logits processor steering\.vllm:Bias to every vLLM engine"
    ):
        engine.start()
    connected = SimpleNamespace(sync=None, ranks=())
    for call, argument in ((engine.connect, connected), (engine.receive_weights, 1)):
        with pytest.raises(RuntimeError, match=r"^engine 0 is not running: start it first$"):
            call(argument)
