"""Types of a profile's fields, with their checks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

_INTERFACE = re.compile(r"[^\s,/]{1,15}")
_MOUNT = re.compile(r"/[^\s,:]*(:/[^\s,:]*(:[^\s,:/]+)?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_FILE = Path(__file__).parent / "templates" / "own_options.yaml"
OWN_OPTIONS: Mapping[str, Mapping[str, str]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
"""Options that MegaRL itself gives to sbatch and srun, and what to do instead."""


def _check_line(text: str) -> str:
    if not text or re.search(r"[\r\n\x00]", text):
        raise ValueError("should be a line of text")
    return text


def _check_path(text: str) -> str:
    if text.startswith("~"):
        raise ValueError("should be a path in full: ~ is not read as a home directory there")
    return text


def _check_interface(text: str) -> str:
    if not _INTERFACE.fullmatch(text):
        raise ValueError("should be the name of one interface, as ib0")
    return text


def _check_variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ValueError("should be a name of letters, digits and underscores")
    if name == "RAY_AUTH_TOKEN":
        raise ValueError("should not be there: each job makes its own, and keeps it out of files")
    if name.startswith("SLURM_"):
        why = "Slurm sets it for each task, and srun takes options"
        raise ValueError(f"should not be there: {why}")
    return name


def _check_mounts(mounts: Sequence[str]) -> Sequence[str]:
    wrong = [mount for mount in mounts if not _MOUNT.fullmatch(mount)]
    if wrong:
        rule = "absolute paths, as /data or /data:/inside, without spaces and commas"
        raise ValueError(f"should be {rule}; not {', '.join(wrong)}")
    return mounts


def _without(own_options: Mapping[str, str]) -> AfterValidator:
    """Refuses short options, and those that MegaRL itself gives."""

    def check(options: Sequence[str]) -> Sequence[str]:
        refused: list[str] = []
        for option in options:
            name = option.partition("=")[0]
            if not name.startswith("--"):
                refused.append(f"{option} (write it as --name=value)")
            elif name in own_options:
                refused.append(f"{option} ({own_options[name]})")
        if refused:
            raise ValueError(f"should be without {', '.join(refused)}")
        return options

    return AfterValidator(check)


def _number_as_text(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


Line = Annotated[str, AfterValidator(_check_line)]
InFull = Annotated[Line, AfterValidator(_check_path)]
VariableName = Annotated[str, AfterValidator(_check_variable)]
Memory = Annotated[Line, BeforeValidator(_number_as_text)]
Interface = Annotated[Line, AfterValidator(_check_interface)]
Value = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$"), BeforeValidator(_number_as_text)]
Lines = Annotated[tuple[Line, ...], Field(strict=False)]
Mounts = Annotated[Lines, AfterValidator(_check_mounts)]
SbatchOptions = Annotated[Lines, _without(OWN_OPTIONS["sbatch"])]
SrunOptions = Annotated[Lines, _without(OWN_OPTIONS["srun"])]
