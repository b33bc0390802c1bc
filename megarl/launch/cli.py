"""``megarl launch slurm``: runs as jobs of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup


class LaunchGroup(TyperGroup):
    """Names the commands where a configuration is given without one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not args[0].startswith("-"):
            names = "|".join(self.commands)
            ctx.fail(f"{args[0]} is none of {names}; write megarl launch {names} CONFIG")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="launch",
    cls=LaunchGroup,
    help="Run on a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_job = partial(typer.Option, rich_help_panel="The job")
_count = partial(_job, metavar="N", min=1)
_runtime = partial(typer.Option, rich_help_panel="Where megarl is installed")
_PROFILE = "The cluster's profile, instead of ~/.config/megarl/cluster.yaml. Options of the command line override it."
_CONFIGS = "YAML file of the run, and settings to override. Several files are a chain of jobs."
_GRACE = "Seconds before the time limit at which the run gets the signal to save (up to 60 s earlier); 0 disables this."
_REQUEUE = "Start the job again when its run has saved and left, is preempted, or loses a node (default), or not."
_GPUS = "How GPUs are requested: gpus-per-node, gres or none."
_MOUNTS = "Directories to mount besides the working directory and run.dir; repeatable."
_PYTHON = "Interpreter that has megarl: without a container this one, in a container python."
_RUNTIME = "bare, the nodes' own file system; or pyxis, apptainer."
_FURTHER = "Further option, as "
_IMAGE = "Image; for Pyxis unless another runtime is given."
_START_LIMIT = "Seconds for the nodes to find each other, and again to start Ray."
_ARGUMENT = typer.Argument(metavar="CONFIG|KEY.PATH=VALUE", show_default=False, help=_CONFIGS)

Text = str | None
Texts = list[str] | None
ProfileOption = Annotated[Path | None, typer.Option(metavar="FILE", help=_PROFILE)]
Nodes = Annotated[int | None, _count(help="Nodes, as cluster.nodes=N.")]
GPUsPerNode = Annotated[int | None, _count(help="GPUs per node, as cluster.devices_per_node=N.")]
Time = Annotated[Text, _job(help="Time limit, as 04:00:00.")]
Partition = Annotated[Text, _job(help="Partition.")]
Account = Annotated[Text, _job(help="Account to charge.")]
Python = Annotated[Text, _runtime(help=_PYTHON)]
GPURequest = Literal["gpus-per-node", "gres", "none"]
RuntimeName = Literal["bare", "pyxis", "apptainer"]


@app.command()
def slurm(
    arguments: Annotated[list[str], _ARGUMENT],
    profile: ProfileOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write and show the script; submit nothing.")] = False,
    nodes: Nodes = None,
    gpus_per_node: GPUsPerNode = None,
    time: Time = None,
    partition: Partition = None,
    account: Account = None,
    qos: Annotated[Text, _job(help="Quality of service.")] = None,
    reservation: Annotated[Text, _job(help="Reservation.")] = None,
    constraint: Annotated[Text, _job(help="Features that the nodes must have.")] = None,
    cpus_per_task: Annotated[int | None, _count(help="CPUs per node; all of an exclusive one.")] = None,
    mem: Annotated[Text, _job(help="Memory per node, as 500G; all of an exclusive one.")] = None,
    exclusive: Annotated[bool | None, _job(help="Take whole nodes (default), or share them.")] = None,
    gpu_request: Annotated[GPURequest | None, _job(metavar="KIND", help=_GPUS)] = None,
    gpu_type: Annotated[Text, _job(help="Type of the GPUs, where the cluster requires one.")] = None,
    job_name: Annotated[Text, _job(help="Name of the job; default: the name of run.dir.")] = None,
    dependency: Annotated[Text, _job(help="Condition for the start, as afterok:1234.")] = None,
    grace: Annotated[int | None, _job(metavar="N", min=0, help=_GRACE)] = None,
    requeue: Annotated[bool | None, _job(help=_REQUEUE)] = None,
    interface: Annotated[Text, _job(help="Network interface between the nodes, as ib0.")] = None,
    start_limit: Annotated[float | None, _job(help=_START_LIMIT)] = None,
    env: Annotated[Texts, _job(metavar="NAME=VALUE", help="Environment variable of the job; repeatable.")] = None,
    setup: Annotated[Texts, _job(metavar="LINE", help="Line of shell that prepares the job; repeatable.")] = None,
    sbatch: Annotated[Texts, _job(metavar="OPTION", help=_FURTHER + "--sbatch=--mail-type=FAIL; repeatable.")] = None,
    srun: Annotated[Texts, _job(metavar="OPTION", help=_FURTHER + "--srun=--mpi=none; repeatable.")] = None,
    runtime: Annotated[RuntimeName | None, _runtime(metavar="KIND", help=_RUNTIME)] = None,
    container: Annotated[Text, _runtime(metavar="IMAGE", help=_IMAGE)] = None,
    mounts: Annotated[Texts, _runtime(metavar="DIR[:INSIDE],...", help=_MOUNTS)] = None,
    python: Python = None,
) -> None:
    """Submit CONFIG as a Slurm job, which starts Ray on its nodes and the run on top.

    The configuration is checked first, and kept in run.dir/slurm with the script, which you may edit and submit again.
    All mistakes are reported at once, and then nothing is written or submitted.
    """
    given = dict(locals())
    from megarl.launch.profile import Profile
    from megarl.launch.request import LaunchRequest, split_arguments
    from megarl.launch.submit import launch

    configs, overrides = split_arguments(arguments)
    runtime_settings = {
        "name": runtime,
        "image": container,
        "mounts": list(filter(None, ",".join(mounts or ()).split(","))),
        "python": python,
    }
    settings = {name: given[name] for name in given if name in Profile.model_fields}
    settings["env"] = _variables(env or ())
    settings["runtime"] = _without_empty(runtime_settings)
    request = LaunchRequest(
        configs=configs,
        overrides=overrides,
        profile=profile,
        settings=_without_empty(settings),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        job_name=job_name,
        dependency=dependency,
        dry_run=dry_run,
    )
    raise typer.Exit(launch(request))


def _without_empty(options: Mapping[str, object]) -> dict[str, object]:
    """Returns the options that the command line has."""
    return {name: value for name, value in options.items() if value not in (None, [], {})}


def _variables(texts: Sequence[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--env")
        if name in variables:
            raise typer.BadParameter(f"{name} is given twice; give it once", param_hint="--env")
        variables[name] = value
    return variables
