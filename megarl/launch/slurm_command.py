"""``megarl launch slurm``: its arguments and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

_JOB, _CONTAINER = "The job", "Where megarl is installed"
_SEVERAL, _APART = "Several runs", "A heterogeneous job"


class GPURequest(StrEnum):
    """How GPUs are asked for."""

    GPUS_PER_NODE = "gpus-per-node"
    GRES = "gres"
    NONE = "none"


class Runtime(StrEnum):
    """Where megarl is installed."""

    BARE = "bare"
    PYXIS = "pyxis"
    ENROOT = "enroot"
    APPTAINER = "apptainer"


def slurm(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|KEY.PATH=VALUE",
            show_default=False,
            help="YAML file of the run, and settings to override. Several files are jobs that follow each other.",
        ),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The cluster's profile, in place of ~/.config/megarl/cluster.yaml. Options given here go before it.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the script and show it; submit nothing.")] = False,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Nodes, as cluster.nodes=N.", rich_help_panel=_JOB)
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="GPUs of each, as cluster.devices_per_node=N.", rich_help_panel=_JOB),
    ] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, as 04:00:00.", rich_help_panel=_JOB)] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.", rich_help_panel=_JOB)] = None,
    account: Annotated[str | None, typer.Option(help="Account that is charged.", rich_help_panel=_JOB)] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.", rich_help_panel=_JOB)] = None,
    reservation: Annotated[str | None, typer.Option(help="Reservation.", rich_help_panel=_JOB)] = None,
    constraint: Annotated[
        str | None, typer.Option(help="Features that the nodes must have.", rich_help_panel=_JOB)
    ] = None,
    cpus_per_task: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="CPUs of each node; all of an exclusive one.", rich_help_panel=_JOB),
    ] = None,
    mem: Annotated[
        str | None, typer.Option(help="Memory of each node, as 500G; all of an exclusive one.", rich_help_panel=_JOB)
    ] = None,
    exclusive: Annotated[
        bool | None, typer.Option(help="Take whole nodes, or share them. Whole ones.", rich_help_panel=_JOB)
    ] = None,
    gpu_request: Annotated[
        GPURequest | None,
        typer.Option(metavar="KIND", help="How GPUs are asked for: gpus-per-node, gres or none.", rich_help_panel=_JOB),
    ] = None,
    gpu_type: Annotated[
        str | None, typer.Option(help="Type of the GPUs, where it must be said.", rich_help_panel=_JOB)
    ] = None,
    job_name: Annotated[
        str | None, typer.Option(help="As Slurm shows it; the name of run.dir.", rich_help_panel=_JOB)
    ] = None,
    dependency: Annotated[
        str | None, typer.Option(help="What the job waits for, as afterok:1234.", rich_help_panel=_JOB)
    ] = None,
    grace: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Seconds before the time limit at which the run is ended in order, up to 60 earlier; "
            "0 leaves it to Slurm.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="Network interface between the nodes, as ib0.", rich_help_panel=_JOB)
    ] = None,
    start_limit: Annotated[
        float | None,
        typer.Option(help="Seconds for the nodes to find each other and to start Ray.", rich_help_panel=_JOB),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Environment variable of the job; repeatable.", rich_help_panel=_JOB),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="LINE", help="Line of shell that prepares the job; repeatable.", rich_help_panel=_JOB),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION", help="Further option, as --sbatch=--mail-type=FAIL; repeatable.", rich_help_panel=_JOB
        ),
    ] = None,
    srun: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Further option, as --srun=--mpi=none; repeatable.", rich_help_panel=_JOB),
    ] = None,
    runtime: Annotated[
        Runtime | None,
        typer.Option(
            metavar="KIND",
            help="bare, the nodes' own file system; or pyxis, enroot, apptainer.",
            rich_help_panel=_CONTAINER,
        ),
    ] = None,
    container: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Image; by Pyxis, unless another runtime is said.", rich_help_panel=_CONTAINER
        ),
    ] = None,
    mounts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR[:INSIDE],...",
            help="Directories that the container sees besides the present one and run.dir; repeatable.",
            rich_help_panel=_CONTAINER,
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            help="Interpreter that has megarl: without a container this one, in a container python.",
            rich_help_panel=_CONTAINER,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY.PATH=VALUE,...",
            help="A run for each value, in directories below run.dir; repeatable: a run for each combination.",
            rich_help_panel=_SEVERAL,
        ),
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Runs of a sweep at the same time.", rich_help_panel=_SEVERAL)
    ] = None,
    rollout_nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Of the nodes, the last ones: they have the engines, as the second component of the job.",
            rich_help_panel=_APART,
        ),
    ] = None,
    rollout_partition: Annotated[
        str | None, typer.Option(help="Partition of the rollout nodes.", rich_help_panel=_APART)
    ] = None,
) -> None:
    """Submit CONFIG as a Slurm job: Ray on all of its nodes, and the run on top.

    It is checked first, and kept in run.dir/slurm with the script, which is
    yours to edit and to submit again. A mistake is told with all others, and
    nothing is written or submitted then.
    """
    given = {
        "time": time,
        "partition": partition,
        "account": account,
        "qos": qos,
        "reservation": reservation,
        "constraint": constraint,
        "cpus_per_task": cpus_per_task,
        "mem": mem,
        "exclusive": exclusive,
        "gpu_request": gpu_request and gpu_request.value,
        "gpu_type": gpu_type,
        "grace": grace,
        "interface": interface,
        "start_limit": start_limit,
        "env": _variables(env or ()),
        "setup": setup,
        "sbatch": sbatch,
        "srun": srun,
        "runtime": _given(
            {
                "name": runtime and runtime.value,
                "image": container,
                "mounts": [mount for text in mounts or () for mount in text.split(",") if mount],
                "python": python,
            }
        ),
    }
    from megarl.launch.request import Request, split_arguments
    from megarl.launch.slurm import launch

    configs, overrides = split_arguments(arguments)
    request = Request(
        configs=configs,
        overrides=overrides,
        profile=profile,
        settings=_given(given),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        job_name=job_name,
        dependency=dependency,
        sweeps=tuple(sweep or ()),
        parallel=parallel,
        rollout_nodes=rollout_nodes,
        rollout_partition=rollout_partition,
        dry_run=dry_run,
    )
    raise typer.Exit(launch(request))


def _given(options: Mapping[str, object]) -> dict[str, object]:
    """Those options that were given."""
    return {name: value for name, value in options.items() if value is not None and value != [] and value != {}}


def _variables(texts: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--env")
        if name in given:
            raise typer.BadParameter(f"{name} is given twice; give it once", param_hint="--env")
        given[name] = value
    return given
