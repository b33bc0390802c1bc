"""``megarl launch slurm``: runs as jobs of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

app = typer.Typer(
    name="launch",
    help="Run on a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_PROFILE = "The cluster's profile, instead of ~/.config/megarl/cluster.yaml. Options of the command line override it."
_CONFIGS = "YAML file of the run, and settings to override. Several files are a chain of jobs."
_PYTHON = "Interpreter that has megarl: without a container this one, in a container python."
_SET = "Another field of the profile, as --set qos=high or --set runtime.image=FILE, the value in YAML; repeatable."
_ARGUMENT = typer.Argument(metavar="CONFIG|KEY.PATH=VALUE", show_default=False, help=_CONFIGS)
_NODES = "Nodes, as cluster.nodes=N."
_GPUS = "GPUs per node, as cluster.devices_per_node=N."

Text = str | None
ProfileOption = Annotated[Path | None, typer.Option(metavar="FILE", help=_PROFILE)]
Nodes = Annotated[int | None, typer.Option(metavar="N", min=1, help=_NODES)]
GPUsPerNode = Annotated[int | None, typer.Option(metavar="N", min=1, help=_GPUS)]
Time = Annotated[Text, typer.Option(help="Time limit, as 04:00:00.")]
Partition = Annotated[Text, typer.Option(help="Partition.")]
Account = Annotated[Text, typer.Option(help="Account to charge.")]
Python = Annotated[Text, typer.Option(help=_PYTHON)]


@app.callback()
def main() -> None:
    """Run on a cluster."""


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
    python: Python = None,
    further: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help=_SET)] = None,
    job_name: Annotated[Text, typer.Option(help="Name of the job; default: the name of run.dir.")] = None,
    dependency: Annotated[Text, typer.Option(help="Condition for the start, as afterok:1234.")] = None,
) -> None:
    """Submit CONFIG as a Slurm job, which starts Ray on its nodes and the run on top.

    The configuration is checked first, and kept in run.dir/slurm with the script, which you may
    edit and submit again. All mistakes are reported at once, and then nothing is
    written or submitted.
    """
    from megarl.launch.request import LaunchRequest, split_arguments
    from megarl.launch.submit import launch

    configs, overrides = split_arguments(arguments)
    settings = profile_settings(time=time, partition=partition, account=account, python=python)
    for text in further or ():
        _set(settings, text)
    request = LaunchRequest(
        configs=configs,
        overrides=overrides,
        profile=profile,
        settings=settings,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        job_name=job_name,
        dependency=dependency,
        dry_run=dry_run,
    )
    raise typer.Exit(launch(request))


def profile_settings(*, time: Text, partition: Text, account: Text, python: Text) -> dict[str, Any]:
    """Returns the fields of the profile that options of the command line set."""
    given = {"time": time, "partition": partition, "account": account}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if python is not None:
        settings["runtime"] = {"python": python}
    return settings


def _set(settings: dict[str, Any], text: str) -> None:
    """Sets a field of the profile as FIELD=VALUE says."""
    path, equals, value = text.partition("=")
    *sections, name = path.split(".")
    section = settings
    for key in sections:
        inner = section.setdefault(key, {})
        if not isinstance(inner, dict):
            raise typer.BadParameter(f"{text!r} is below a field that is set to a value", param_hint="--set")
        section = inner
    try:
        section[name] = yaml.safe_load(value)
    except yaml.YAMLError:
        equals = ""
    if not equals or not name:
        raise typer.BadParameter(f"{text!r} is not FIELD=VALUE with a value in YAML", param_hint="--set")
