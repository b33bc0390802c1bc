"""The profile of a cluster: settings of all its jobs, from a file and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import Field, StringConstraints, ValidationError

from megarl.bounds import Count, Natural, Positive
from megarl.config.problems import ConfigError, Problem
from megarl.config.schema.base import Section
from megarl.config.schema.choices import Choice, OneOf
from megarl.config.schema_problems import schema_problems
from megarl.launch import field_types as types


class Bare(Choice):
    """The nodes' own file system: a virtual environment, or a module that ``setup`` loads."""

    name: Literal["bare"] = "bare"
    python: types.InFull | None = None
    """Interpreter that has megarl; null is the one that submits."""


class Pyxis(Choice):
    """A container of srun's Pyxis plugin."""

    name: Literal["pyxis"]
    image: types.InFull
    """Squashfs file or registry name, as for srun's --container-image."""
    mounts: types.Mounts = ()
    """Directories to mount, as /data or /data:/inside, besides the working directory and run.dir."""
    python: types.InFull = "python"
    """Interpreter in the container that has megarl."""


class Apptainer(Choice):
    """A container of Apptainer."""

    name: Literal["apptainer"]
    image: types.InFull
    """SIF file, or another image for apptainer exec."""
    mounts: types.Mounts = ()
    """Directories to mount, as /data or /data:/inside, besides the working directory and run.dir."""
    exec_options: types.Lines = Field(default=(), alias="options")
    """Further options of apptainer exec, each in one piece; --nv is added with GPUs."""
    python: types.InFull = "python"
    """Interpreter in the container that has megarl."""


Runtime = Bare | Pyxis | Apptainer


class Local(Choice):
    """This machine is a login node."""

    name: Literal["local"]


class SSH(Choice):
    """A login node, reached by SSH."""

    name: Literal["ssh"]
    host: types.Line
    """Name of the login node."""
    user: types.Line
    """User on it."""
    job_dir: types.Line
    """Directory on it for the files of experiments."""
    directory: Annotated[types.Line, StringConstraints(pattern="^/")]
    """Working directory of the runs; relative paths of configurations start from it."""
    identity: types.Line | None = None
    """File of the private key; null leaves it to the SSH agent."""


class NemoRun(Section):
    """Settings of NeMo-Run alone."""

    tunnel: Annotated[Local | SSH, OneOf(Local, SSH, default="ssh")] = Local(name="local")
    """Where jobs are submitted: on this machine, or on a login node by SSH."""


class Profile(Section):
    """Settings of all jobs on a cluster."""

    partition: types.Line | None = None
    """Partition, or several separated by commas; null is the cluster's default."""
    account: types.Line | None = None
    """Account to charge; null is the user's default."""
    qos: types.Line | None = None
    """Quality of service; null is the default."""
    reservation: types.Line | None = None
    """Reservation whose nodes are used; null uses unreserved nodes."""
    constraint: types.Line | None = None
    """Features that the nodes must have."""
    time: types.Line | None = None
    """Time limit, as "04:00:00" or "2-00:00:00", in quotes; null is the partition's default."""
    grace: Natural = 60
    """Seconds before the time limit at which the run gets the signal to save (up to 60 s earlier); 0 disables this."""
    requeue: bool = True
    """Start the job again when its run has saved and left, is preempted, or loses a node."""
    cpus_per_task: Count | None = None
    """CPUs per node; null takes all of an exclusive node, and otherwise the cluster's default."""
    mem: types.Memory | None = None
    """Memory per node, as 500G; null takes all of an exclusive node, and otherwise the cluster's default."""
    exclusive: bool = True
    """Take whole nodes."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How GPUs are requested; none where whole nodes are allocated and GPUs are no resource of the cluster."""
    gpu_type: types.Line | None = None
    """Type of the GPUs, as h100, where the cluster requires one."""
    sbatch: types.SbatchOptions = ()
    """Further options of sbatch, each in one piece, such as --mail-type=FAIL."""
    srun: types.SrunOptions = ()
    """Further options of srun, each in one piece."""
    env: Mapping[types.VariableName, types.Value] = {}
    """Environment variables of the job, not expanded; use setup to expand $NAME."""
    setup: types.Lines = ()
    """Lines of shell that prepare the job on its first node: module load ..., source ..., export ..."""
    interface: types.Interface | None = None
    """Network interface between the nodes, such as ib0; null is that of the route between them."""
    start_limit: Positive = 600.0
    """Seconds for the nodes to find each other, and again to start Ray."""
    runtime: Annotated[Runtime, OneOf(Bare, Pyxis, Apptainer, default="bare")] = Bare()
    """Where megarl is installed: on the nodes, or in an image."""
    nemo_run: NemoRun = NemoRun()
    """Settings of NeMo-Run alone."""


def load_profile(path: Path | None = None, settings: Mapping[str, object] | None = None) -> Profile:
    """Reads and checks a profile, the user's by default; raises a ConfigError with every problem.

    Args:
        settings: fields that replace those of the file.
    """
    file = path or Path.home() / ".config" / "megarl" / "cluster.yaml"
    raw: dict[str, Any] = {}
    sources: list[str] = []
    if path is not None or file.exists():
        raw = _read(file)
        sources.append(str(file))
    if settings:
        sources.append("command line")
    try:
        return Profile.model_validate(_merge(raw, settings or {}))
    except ValidationError as error:
        raise ConfigError(schema_problems(error, Profile), " and ".join(sources)) from None


def _read(file: Path) -> dict[str, Any]:
    fix = "correct the file; docs/slurm.md has an example"
    try:
        read = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        if isinstance(read, dict):
            return cast(dict[str, Any], read)
        rule = "the file must hold keys and values"
    except OSError as error:
        rule = f"the file must be readable ({error.strerror})"
        fix = "correct the path; docs/slurm.md has an example of a file"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        rule = f"the file must be YAML: {' '.join(str(error).split())}"
    raise ConfigError([Problem("profile", str(file), rule, fix)], str(file))


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merges mappings and replaces other values; a runtime of another name does not keep the former one's options."""
    merged = dict(below)
    for key, value in above.items():
        former = merged.get(key)
        if key == "runtime" and isinstance(former, str):
            former = {"name": former}
        if isinstance(former, dict) and isinstance(value, Mapping):
            if key == "env" or value.get("name") in (None, former.get("name")):
                value = _merge(former, value)
        merged[key] = value
    return merged
