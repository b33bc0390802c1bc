"""The values of a cluster's profile, and what holds of each by itself."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?")
_TIME = re.compile(r"(\d+-\d+|\d+)(:[0-5]?\d){0,2}")
_MOUNT = re.compile(r"/[^\s,:]*(:/[^\s,:]*(:[^\s,:/]+)?)?")
PARTITIONS = (r"[^\s,]+(,[^\s,]+)*", "a name without spaces, or several with commas between")
"""What matches names of partitions, and the rule in words."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

OWN_SBATCH: Mapping[str, str] = {
    "--account": "set the field account",
    "--array": "give --sweep on the command line",
    "--chdir": "the job works in the directory in which megarl is called",
    "--constraint": "set the field constraint",
    "--container": "set the field runtime",
    "--cpus-per-task": "set the field cpus_per_task",
    "--dependency": "give --dependency on the command line",
    "--error": "messages are in the output, in run.dir",
    "--exclusive": "set the field exclusive",
    "--gpus": "set the fields gpu_request and gpu_type",
    "--gpus-per-node": "set the fields gpu_request and gpu_type",
    "--gpus-per-task": "set the fields gpu_request and gpu_type",
    "--gres": "set the fields gpu_request and gpu_type",
    "--job-name": "give --job-name on the command line",
    "--kill-on-invalid-dep": "a job goes where the one that it waits for fails",
    "--mem": "set the field mem",
    "--mem-per-cpu": "set the field mem",
    "--mem-per-gpu": "set the field mem",
    "--nodes": "give --nodes on the command line",
    "--ntasks": "there is one task per node",
    "--ntasks-per-gpu": "there is one task per node",
    "--ntasks-per-node": "there is one task per node",
    "--output": "it is in run.dir",
    "--partition": "set the field partition",
    "--qos": "set the field qos",
    "--requeue": "a job is not requeued",
    "--reservation": "set the field reservation",
    "--signal": "set the field grace",
    "--test-only": "give --dry-run on the command line",
    "--time": "set the field time",
    "--wrap": "the job has a script",
}
"""Options of sbatch that are not for the profile's list, and what is instead."""

OWN_SRUN: Mapping[str, str] = {
    "--container": "set the field runtime",
    "--container-env": "set the field env",
    "--container-image": "set the field runtime.image",
    "--container-mounts": "set the field runtime.mounts",
    "--container-workdir": "the job works in the directory in which megarl is called",
    "--cpu-bind": "the processes of the task may use all of its CPUs",
    "--cpus-per-task": "set the field cpus_per_task",
    "--error": "messages are in the job's output",
    "--export": "set the field env; all variables of the job are passed on",
    "--het-group": "give --rollout-nodes on the command line",
    "--kill-on-bad-exit": "the nodes end each other",
    "--nodes": "give --nodes on the command line",
    "--ntasks": "there is one task per node",
    "--ntasks-per-node": "there is one task per node",
    "--output": "it is the job's",
    "--wait": "srun gives up a task that does not end start_limit and two minutes after another one",
}
"""The same of srun."""


def _number_as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _options(own: Mapping[str, str]) -> AfterValidator:
    """Accepts long options in one piece that are none of those, shortened neither."""

    def wrong(option: str) -> str | None:
        if _OPTION.fullmatch(option) is None:
            return f"{option} (not in one piece, as --name=value)"
        meant = sorted(name for name in own if name.startswith(option.partition("=")[0]))
        return f"{option} ({own[meant[0]]})" if meant else None

    def check(options: Sequence[str]) -> Sequence[str]:
        found = [text for text in map(wrong, options) if text]
        if found:
            raise ValueError(f"should be without {', '.join(found)}")
        return options

    return AfterValidator(check)


def _of_variable(name: str) -> str:
    if _VARIABLE.fullmatch(name) is None:
        raise ValueError("should be a name of letters, digits and underscores")
    if name == "RAY_AUTH_TOKEN":
        raise ValueError("should not be there: each job makes its own, and keeps it out of files")
    if name.startswith("SLURM_"):
        raise ValueError("should not be there: Slurm sets it for each task, and srun takes options")
    return name


def _line(text: str) -> str:
    if not text or re.search(r"[\r\n\x00]", text):
        raise ValueError("should be a line of text")
    return text


def _matching(pattern: str, rule: str) -> AfterValidator:
    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"should be {rule}")
        return text

    return AfterValidator(check)


def _in_full(text: str) -> str:
    if text.startswith("~"):
        raise ValueError("should be a path in full: ~ is not read as a home directory there")
    return text


def _time_limit(text: str) -> str:
    seconds_of(text)
    return text


def _mounts(mounts: Sequence[str]) -> Sequence[str]:
    wrong = [mount for mount in mounts if _MOUNT.fullmatch(mount) is None]
    if wrong:
        rule = "should be absolute paths, as /data or /data:/inside, without spaces and commas"
        raise ValueError(f"{rule}; not {', '.join(wrong)}")
    return mounts


def _without_options(mounts: Sequence[str]) -> Sequence[str]:
    for mount in mounts:
        if mount.count(":") > 1:
            raise ValueError(f"should have one colon at most, for enroot takes no options as :ro; {mount!r} has more")
    return mounts


def _shell(lines: Sequence[str]) -> Sequence[str]:
    said = subprocess.run(
        ["/bin/bash", "-O", "extglob", "-n"],
        input="\n".join(lines),
        env={"LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    ).stderr
    if said:
        raise ValueError(f"should be shell that bash can read; {said.splitlines()[0].removeprefix('/bin/bash: ')}")
    return lines


def _environment_passes(options: Sequence[str]) -> Sequence[str]:
    for option in options:
        if option.partition("=")[0] in ("-e", "--cleanenv", "-c", "--contain", "-C", "--containall"):
            raise ValueError(f"should not be {option}: the container needs the job's variables and temporary files")
    return options


Line = Annotated[str, AfterValidator(_line)]
InFull = Annotated[Line, AfterValidator(_in_full)]
TimeLimit = Annotated[str, AfterValidator(_time_limit)]
VariableName = Annotated[str, AfterValidator(_of_variable)]
Partitions = Annotated[Line, _matching(*PARTITIONS)]
Memory = Annotated[
    Line,
    BeforeValidator(_number_as_text),
    _matching(r"(?i)\d+([KMGT]B?)?", "a number of megabytes, or with a unit, as 500G"),
]
Interface = Annotated[Line, _matching(r"[^\s,/]{1,15}", "the name of one interface, as ib0")]
Value = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$"), BeforeValidator(_number_as_text)]
Mounts = Annotated[tuple[Line, ...], Field(strict=False), AfterValidator(_mounts)]
PlainMounts = Annotated[Mounts, AfterValidator(_without_options)]
Lines = Annotated[tuple[Line, ...], Field(strict=False)]
Shell = Annotated[Lines, AfterValidator(_shell)]
ExecOptions = Annotated[Lines, AfterValidator(_environment_passes)]
SbatchOptions = Annotated[tuple[Line, ...], Field(strict=False), _options(OWN_SBATCH)]
SrunOptions = Annotated[tuple[Line, ...], Field(strict=False), _options(OWN_SRUN)]


def seconds_of(time: str) -> float:
    """A time limit of Slurm in seconds.

    Args:
        time: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS, or UNLIMITED.

    Raises:
        ValueError: it is none.
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    if _TIME.fullmatch(time) is None:
        raise ValueError("should be a time limit of Slurm: minutes, HH:MM:SS or D-HH:MM:SS")
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
