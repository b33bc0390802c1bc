"""Types of a profile's fields, with their checks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

_EACH_ITS_OWN = "not be there: each job makes its own, and keeps it out of files"
_MOUNT = re.compile(r"/[^\s,:]*(:/[^\s,:]*(:[^\s,:/]+)?)?")

_FILE = Path(__file__).parent / "templates" / "own_options.yaml"
OWN_OPTIONS: Mapping[str, Mapping[str, str]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
"""Options that MegaRL itself gives to sbatch and srun, and what to do instead."""


def _matching(pattern: str, rule: str) -> AfterValidator:
    """Requires a text that matches the pattern from its beginning to its end."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"should {rule}")
        return text

    return AfterValidator(check)


def _check_mounts(mounts: Sequence[str]) -> Sequence[str]:
    wrong = [mount for mount in mounts if not _MOUNT.fullmatch(mount)]
    if wrong:
        rule = "absolute paths, as /data or /data:/inside, without spaces and commas"
        raise ValueError(f"should be {rule}; not {', '.join(wrong)}")
    return mounts


def _check_options(own_options: Mapping[str, str], options: Sequence[str]) -> Sequence[str]:
    """Refuses short options, and those that MegaRL itself gives."""
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


def _number_as_text(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


Line = Annotated[str, _matching(r"[^\r\n\x00]+", "be a line of text")]
InFull = Annotated[Line, _matching("[^~].*", "be a path in full: ~ is not read as a home directory there")]
VariableName = Annotated[
    str,
    _matching("[A-Za-z_][A-Za-z0-9_]*", "be a name of letters, digits and underscores"),
    _matching("(?!RAY_AUTH_TOKEN$).*", _EACH_ITS_OWN),
    _matching("(?!SLURM_).*", "not be there: Slurm sets it for each task, and srun takes options"),
]
Memory = Annotated[Line, BeforeValidator(_number_as_text)]
Interface = Annotated[Line, _matching(r"[^\s,/]{1,15}", "be the name of one interface, as ib0")]
Value = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$"), BeforeValidator(_number_as_text)]
Lines = Annotated[tuple[Line, ...], Field(strict=False)]
Mounts = Annotated[Lines, AfterValidator(_check_mounts)]
SbatchOptions = Annotated[Lines, AfterValidator(partial(_check_options, OWN_OPTIONS["sbatch"]))]
SrunOptions = Annotated[Lines, AfterValidator(partial(_check_options, OWN_OPTIONS["srun"]))]
