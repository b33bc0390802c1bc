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

_MOUNT = re.compile(r"/[^\s,:]*(:/[^\s,:]*(:[^\s,:/]+)?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CLEARING = ("-e", "--cleanenv", "-c", "--contain", "-C", "--containall")

_OWN_OPTIONS = Path(__file__).parent / "templates" / "own_options.yaml"
OWN_OPTIONS: Mapping[str, Mapping[str, str]] = yaml.safe_load(_OWN_OPTIONS.read_text(encoding="utf-8"))
"""Options that MegaRL itself gives to sbatch and srun, and what to do instead."""


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
    """Refuses short options, and those that MegaRL gives itself."""

    def why(options: Sequence[str]) -> str | None:
        refused: list[str] = []
        for option in options:
            name = option.partition("=")[0]
            if not name.startswith("--"):
                refused.append(f"{option} (write it as --name=value)")
            elif name in own:
                refused.append(f"{option} ({own[name]})")
        return f"be without {', '.join(refused)}" if refused else None

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
    try:
        seconds_of(text)
    except ValueError:
        return "be a time limit of Slurm: minutes, HH:MM:SS or D-HH:MM:SS"
    return None


def _number_as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Line = Annotated[str, _refuse(lambda text: "be a line of text" if not text or re.search(r"[\r\n\x00]", text) else None)]
_HOME = "be a path in full: ~ is not read as a home directory there"
InFull = Annotated[Line, _refuse(lambda text: _HOME if text.startswith("~") else None)]
TimeLimit = Annotated[str, _refuse(_bad_time)]
VariableName = Annotated[str, _refuse(_bad_variable)]
Memory = Annotated[Line, BeforeValidator(_number_as_text)]
Interface = Annotated[Line, _matching(r"[^\s,/]{1,15}", "the name of one interface, as ib0")]
Value = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$"), BeforeValidator(_number_as_text)]
Lines = Annotated[tuple[Line, ...], Field(strict=False)]
Mounts = Annotated[Lines, _refuse(_bad_mounts)]
Shell = Annotated[Lines, _refuse(_bad_shell)]
ExecOptions = Annotated[Lines, _refuse(_clears_environment)]
SbatchOptions = Annotated[Lines, _without(OWN_OPTIONS["sbatch"])]
SrunOptions = Annotated[Lines, _without(OWN_OPTIONS["srun"])]


def seconds_of(time: str) -> float:
    """Returns a time limit in seconds: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED.

    Raises:
        ValueError: the text is none of these.
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    if len(parts) > len(units):
        raise ValueError(f"{time} has more parts than days, hours, minutes and seconds")
    whole_days = int(days) if dash else 0
    return whole_days * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
