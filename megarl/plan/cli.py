"""``megarl plan`` of a run's configuration, or of a transfer of weights."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup


class ConfigCommand(TyperCommand):
    """A command with a configuration; says of an unknown option how a field is set."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for param in self.get_params(ctx) for name in param.opts}
        for name, _, value in (arg.partition("=") for arg in args):
            if name[2:] and name.startswith("--") and name not in known:
                field = f"{name[2:]}={value or 'VALUE'}"
                ctx.fail(f"No such option: {name}. Fields of the configuration come after its file, as {field}")
        return super().parse_args(ctx, args)


class PlanGroup(TyperGroup):
    """Treats a first argument that is no command as the path of a configuration."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["config", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="plan",
    cls=PlanGroup,
    help="Check a run, or plan a transfer of weights, without starting anything: `megarl plan CONFIG` "
    "(short for `megarl plan config CONFIG`), `megarl plan memory CONFIG`, or `megarl plan weights OPTIONS`.",
    subcommand_metavar="CONFIG|COMMAND [ARGS]...",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command()
def weights(
    hf: Annotated[str, typer.Option(metavar="DIR|FILE", help="The model's HF directory, or its config.json.")],
    train: Annotated[
        str,
        typer.Option(metavar="tp=8,pp=16,dp=4,...", help="The trainer's layout: tp, pp, dp, vpp, ep; 1 by default."),
    ],
    rollout: Annotated[str, typer.Option(metavar="tp=8,replicas=64", help="The engines: tp of each, and how many.")],
    devices_per_node: Annotated[int, typer.Option(min=1, help="Consecutive devices on one node.")] = 8,
    colocated: Annotated[
        bool, typer.Option("--colocated", help="The engines are on the trainer's devices, not on the next ones.")
    ] = False,
    bucket_mib: Annotated[
        float, typer.Option(metavar="MIB", min=2**-17, max=2**20, help="The largest message, as resharding.bucket_mib.")
    ] = 256.0,
    link: Annotated[
        str,
        typer.Option(
            metavar="device=2000,node=400,network=50",
            help="GB/s of one rank, each way: to its device's other process, to its node, to other nodes.",
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
) -> None:
    """Plan the transfer of a trainer's weights to engines, without weights or devices.

    Prints bytes, messages, memory and the estimated time. Ranks are on devices in order: the
    trainer's, TP fastest, then DP, then PP; then the engines', one after the other.
    """
    from megarl.plan.weight_plan import plan_weights, print_weights

    try:
        report = plan_weights(
            hf=hf,
            train=train,
            rollout=rollout,
            devices_per_node=devices_per_node,
            colocated=colocated,
            bucket_mib=bucket_mib,
            link=link,
        )
    except (ValueError, OSError) as error:
        typer.echo(f"megarl plan weights: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_weights(report)
