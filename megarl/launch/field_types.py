"""Types of a profile's fields, with their checks."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?")
_TIME = re.compile(r"(\d+-\d+|\d+)(:[0-5]?\d){0,2}")
_MOUNT = re.compile(r"/[^\s,:]*(:/[^\s,:]*(:[^\s,:/]+)?)?")
_PARTITIONS = (r"[^\s,]+(,[^\s,]+)*", "a name without spaces, or several with commas between")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CLEARING = ("-e", "--cleanenv", "-c", "--contain", "-C", "--containall")

_OWN_OPTIONS = Path(__file__).parent / "templates" / "own_options.yaml"
OWN_OPTIONS: Mapping[str, Mapping[str, str]] = yaml.safe_load(_OWN_OPTIONS.read_text(encoding="utf-8"))
"""Options of sbatch and srun that the profile's lists refuse, and what to do instead."""


def _refuse(why: Callable[[Any], str | None]) -> AfterValidator:
    """Refuses values for which `why` returns a rule, as 'be a line of text'."""

    def validate(value: Any) -> Any:
        if rule := why(value):
            raise ValueError(f"should {rule}")
        return value

    return AfterValidator(validate)


def _matching(pattern: str, rule: str) -> AfterValidator:
    return _refuse(lambda text: None if re.fullmatch(pattern, text) else f"be {rule}")


def _without(own: Mapping[str, str]) -> AfterValidator:
    """Refuses options that are not in one piece, and those of the table, abbreviated too."""

    def wrong(option: str) -> str | None:
        if _OPTION.fullmatch(option) is None:
            return f"{option} (not in one piece, as --name=value)"
        meant = sorted(name for name in own if name.startswith(option.partition("=")[0]))
        return f"{option} ({own[meant[0]]})" if meant else None

    def why(options: Sequence[str]) -> str | None:
        found = [text for text in map(wrong, options) if text]
        return f"be without {', '.join(found)}" if found else None

    return _refuse(why)


def _bad_variable(name: str) -> str | None:
    if _VARIABLE.fullmatch(name) is None:
        return "be a name of letters, digits and underscores"
    if name == "RAY_AUTH_TOKEN":
        return "not be there: each job makes its own, and keeps it out of files"
    return "not be there: Slurm sets it for each task, and srun takes options" if name.startswith("SLURM_") else None


def _bad_mounts(mounts: Sequence[str]) -> str | None:
    wrong = [mount for mount in mounts if _MOUNT.fullmatch(mount) is None]
    rule = "be absolute paths, as /data or /data:/inside, without spaces and commas"
    return f"{rule}; not {', '.join(wrong)}" if wrong else None


def _bad_shell(lines: Sequence[str]) -> str | None:
    command = ["/bin/bash", "-O", "extglob", "-n"]
    script = "\n".join(lines)
    env = {"LC_ALL": "C"}
    said = subprocess.run(command, input=script, env=env, capture_output=True, text=True, check=False).stderr
    return f"be shell that bash can read; {said.splitlines()[0].removeprefix('/bin/bash: ')}" if said else None


def _clears_environment(options: Sequence[str]) -> str | None:
    found = [option for option in options if option.partition("=")[0] in _CLEARING]
    return f"not be {found[0]}: the container needs the job's variables and temporary files" if found else None


def _bad_time(text: str) -> str | None:
    if text.upper() in ("UNLIMITED", "INFINITE") or _TIME.fullmatch(text):
        return None
    return "be a time limit of Slurm: minutes, HH:MM:SS or D-HH:MM:SS"


def _number_as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Line = Annotated[str, _refuse(lambda text: "be a line of text" if not text or re.search(r"[\r\n\x00]", text) else None)]
_HOME = "be a path in full: ~ is not read as a home directory there"
InFull = Annotated[Line, _refuse(lambda text: _HOME if text.startswith("~") else None)]
TimeLimit = Annotated[str, _refuse(_bad_time)]
VariableName = Annotated[str, _refuse(_bad_variable)]
Partitions = Annotated[Line, _matching(*_PARTITIONS)]
_MEMORY = (r"(?i)\d+([KMGT]B?)?", "a number of megabytes, or with a unit, as 500G")
Memory = Annotated[Line, BeforeValidator(_number_as_text), _matching(*_MEMORY)]
Interface = Annotated[Line, _matching(r"[^\s,/]{1,15}", "the name of one interface, as ib0")]
Value = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$"), BeforeValidator(_number_as_text)]
Lines = Annotated[tuple[Line, ...], Field(strict=False)]
Mounts = Annotated[Lines, _refuse(_bad_mounts)]
Shell = Annotated[Lines, _refuse(_bad_shell)]
ExecOptions = Annotated[Lines, _refuse(_clears_environment)]
SbatchOptions = Annotated[Lines, _without(OWN_OPTIONS["sbatch"])]
SrunOptions = Annotated[Lines, _without(OWN_OPTIONS["srun"])]


def seconds_of(time: str) -> float:
    """Returns a time limit in seconds: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED."""
    if rule := _bad_time(time):
        raise ValueError(f"should {rule}")
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
