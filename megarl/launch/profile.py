"""What a cluster requires of every job: one file per cluster, and the command line on top of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Interpreter in whose environment megarl is; null is the one that submits."""


class Pyxis(Choice):
    """A container by the Pyxis plugin of srun."""

    name: Literal["pyxis"]
    image: types.InFull
    """As srun's --container-image takes it: a squashfs file, or a name of a registry."""
    mounts: types.Mounts = ()
    """Directories that the container sees, as /data or /data:/inside, besides the present one and run.dir."""
    python: types.InFull = "python"
    """Interpreter in the container in whose environment megarl is."""


class Enroot(Choice):
    """A container by enroot alone."""

    name: Literal["enroot"]
    image: types.InFull
    """A squashfs file, or the name of a container that enroot create made on every node."""
    mounts: types.PlainMounts = ()
    """Directories that the container sees, as /data or /data:/inside, besides the present one and run.dir."""
    python: types.InFull = "python"
    """Interpreter in the container in whose environment megarl is."""


class Apptainer(Choice):
    """A container by Apptainer, or Singularity under that name."""

    name: Literal["apptainer"]
    image: types.InFull
    """A SIF file, or what else apptainer exec takes."""
    mounts: types.Mounts = ()
    """Directories that the container sees, as /data or /data:/inside, besides the present one and run.dir."""
    exec_options: types.ExecOptions = Field(default=(), alias="options")
    """Further options of apptainer exec, each in one piece; --nv is there with GPUs."""
    python: types.InFull = "python"
    """Interpreter in the container in whose environment megarl is."""


Runtime = Bare | Pyxis | Enroot | Apptainer


class Local(Choice):
    """This machine is a login node."""

    name: Literal["local"]


class SSH(Choice):
    """A login node, reached by SSH."""

    name: Literal["ssh"]
    host: types.Line
    """Name of the login node."""
    user: types.Line
    """User there."""
    job_dir: types.Line
    """Directory there, for the files of experiments."""
    directory: Annotated[types.Line, StringConstraints(pattern="^/")]
    """Directory there in which the runs work, and from which relative paths of configurations count."""
    identity: types.Line | None = None
    """File of the private key; null leaves it to the agent."""


class NemoRun(Section):
    """What NeMo-Run needs besides."""

    tunnel: Annotated[Local | SSH, OneOf(Local, SSH, default="ssh")] = Local(name="local")
    """From where jobs are submitted: local, or the login node that is named."""


class Profile(Section):
    """What a cluster wants of every job."""

    partition: types.Partitions | None = None
    """Partition, or several with commas between; null is the cluster's usual one."""
    account: types.Line | None = None
    """Account that is charged; null is the user's usual one."""
    qos: types.Line | None = None
    """Quality of service; null is the usual one."""
    reservation: types.Line | None = None
    """Reservation whose nodes are taken; null takes those of nobody's."""
    constraint: types.Line | None = None
    """Features that the nodes must have."""
    time: types.TimeLimit | None = None
    """Time limit, as "04:00:00" or "2-00:00:00", in quotes; null is the partition's."""
    grace: Natural = 60
    """Seconds before the time limit at which the run is ended in order, up to 60 earlier; 0 leaves it to Slurm."""
    cpus_per_task: Count | None = None
    """CPUs of each node; null takes all of an exclusive node, and otherwise what the cluster gives."""
    mem: types.Memory | None = None
    """Memory of each node, as 500G; null takes all of an exclusive node, and otherwise what the cluster gives."""
    exclusive: bool = True
    """Take whole nodes."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How GPUs are asked for; none where whole nodes are given and GPUs are no resource of the cluster."""
    gpu_type: types.Line | None = None
    """Type of the GPUs, where the cluster wants it said: h100."""
    sbatch: types.SbatchOptions = ()
    """Further options of sbatch, each in one piece, such as --mail-type=FAIL."""
    srun: types.SrunOptions = ()
    """Further options of srun, each in one piece."""
    env: Mapping[types.VariableName, types.Value] = {}
    """Environment variables of the job, as they are: for $ and the like there is setup."""
    setup: types.Shell = ()
    """Lines of shell that prepare the job on its first node: module load cuda, source ..., export ..."""
    interface: types.Interface | None = None
    """Network interface whose addresses the nodes use among each other, such as ib0; null is that of the route."""
    start_limit: Positive = 600.0
    """Seconds that the nodes have to find each other, and then to start Ray."""
    runtime: Annotated[Runtime, OneOf(Bare, Pyxis, Enroot, Apptainer, default="bare")] = Bare()
    """Where megarl is installed: on the nodes, or in an image."""
    nemo_run: NemoRun = NemoRun()
    """What NeMo-Run needs besides."""


def found_profile(path: Path | None) -> Path | None:
    """The file that is named, else the user's own, if there is one."""
    own = Path.home() / ".config" / "megarl" / "cluster.yaml"
    return path if path is not None else own if own.exists() else None


def load_profile(path: Path | None = None, settings: Mapping[str, object] | None = None) -> Profile:
    """Reads and checks a cluster's profile.

    Args:
        settings: on top of the file; lists and mappings add to the file's, a runtime of another name replaces it.
    """
    file = found_profile(path)
    raw = _merge({} if file is None else _read(file), settings or {})
    try:
        return Profile.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(schema_problems(error, Profile), "command line" if file is None else str(file)) from None


def _read(file: Path) -> dict[str, Any]:
    fix, read = "correct the file; docs/slurm.md has an example", None
    try:
        read = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        rule = "" if isinstance(read, dict) else "the file must hold keys and values"
    except OSError as error:
        rule = f"the file must be readable ({error.strerror})"
        home = "write it in full: ~ is not read as a home directory there"
        fix = home if str(file).startswith("~") else "correct the path; docs/slurm.md has an example of a file"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        rule = f"the file must be YAML: {' '.join(str(error).split())}"
    if rule:
        raise ConfigError([Problem(field="profile", value=str(file), rule=rule, fix=fix)], str(file))
    return cast(dict[str, Any], read)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Puts settings on top of a file's fields."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if key == "runtime":
            value = _merge_runtime(under, value)
        elif isinstance(under, dict) and isinstance(value, Mapping):
            value = {**under, **value}
        elif isinstance(under, list) and isinstance(value, Sequence) and not isinstance(value, str):
            value = [*under, *value]
        merged[key] = value
    return merged


def _merge_runtime(below: object, above: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the options of another runtime; an image alone is for the file's kind of container, else for Pyxis."""
    under = {"name": below} if isinstance(below, str) else dict(cast(Mapping[str, Any], below or {}))
    before = under.get("name", "bare")
    name = above.get("name", "pyxis" if "image" in above and before == "bare" else before)
    return {**_merge(under if name == before else {}, above), "name": name}
