"""``megarl convert import | export | verify | inspect``; the same as ``python -m tools.checkpoint_convert``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from megarl.convert.resources import Resources

app = typer.Typer(
    name="convert",
    help="Convert checkpoints between Hugging Face's layout and Megatron-LM's; export, verify and inspect them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_BUDGET = "16GiB"
DtypeName = Literal["float64", "float32", "float16", "bfloat16"]
RoleName = Literal["actor", "critic", "reference", "reward"]
"""As of megarl.types, whose records would load numpy for every command."""
HF = Annotated[Path, typer.Option("--hf", help="Hugging Face directory: config.json and weights.")]
Template = Annotated[Path | None, typer.Option("--hf", help="Model's directory, where the checkpoint names none.")]
From = Annotated[Path, typer.Option("--checkpoint", help="Save directory of Megatron-LM, run, or one checkpoint.")]
Out = Annotated[Path, typer.Option("--out", help="Directory to make; it appears when it is complete.")]
Role = Annotated[RoleName | None, typer.Option("--role", help="Role of a run; its actor by default.")]
Step = Annotated[int | None, typer.Option("--step", min=0, help="Which checkpoint; the latest by default.")]
Dtype = Annotated[DtypeName | None, typer.Option("--dtype", help="Cast the weights; they keep their own by default.")]
Budget = Annotated[str, typer.Option("--memory-budget", help="Memory of all processes together, such as 4GiB.")]
Processes = Annotated[int, typer.Option("--processes", min=1, help="Most worker processes; memory may allow fewer.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read pickle files, which could run code.")]
MaxFileSize = Annotated[str, typer.Option("--max-file-size", help="Size of an output file, such as 5GB.")]


@app.command("import")
def import_(
    hf: HF,
    out: Out,
    dtype: Dtype = None,
    max_file_size: MaxFileSize = "1GiB",
    memory_budget: Budget = _BUDGET,
    processes: Processes = 1,
    allow_pickle: AllowPickle = False,
) -> None:
    """Make a Megatron checkpoint, which any layout loads, of a Hugging Face directory."""
    with _exit_codes():
        from megarl.convert.importing import import_checkpoint
        from megarl.convert.resources import parse_bytes

        import_checkpoint(
            hf,
            out,
            resources=_resources(memory_budget, processes),
            dtype=dtype,
            allow_pickle=allow_pickle,
            max_file_bytes=parse_bytes("--max-file-size", max_file_size),
        )
    typer.echo(f"{out} is complete")


@app.command("export")
def export(
    checkpoint: From,
    out: Out,
    hf: Template = None,
    role: Role = None,
    step: Step = None,
    dtype: Dtype = None,
    max_file_size: MaxFileSize = "5GB",
    memory_budget: Budget = _BUDGET,
    processes: Processes = 1,
) -> None:
    """Make a Hugging Face directory of a checkpoint, Megatron-LM's or a run's."""
    with _exit_codes():
        from megarl.convert.exporting import export_checkpoint
        from megarl.convert.resources import parse_bytes

        export_checkpoint(
            checkpoint,
            out,
            resources=_resources(memory_budget, processes),
            template=hf,
            role=role,
            step=step,
            dtype=dtype,
            max_file_bytes=parse_bytes("--max-file-size", max_file_size),
        )
    typer.echo(f"{out} is complete")


@app.command("verify")
def verify(
    hf: HF,
    checkpoint: From,
    role: Role = None,
    step: Step = None,
    dtype: Dtype = None,
    memory_budget: Budget = _BUDGET,
    processes: Processes = 1,
    allow_pickle: AllowPickle = False,
) -> None:
    """Compare a checkpoint with a Hugging Face directory, bit for bit; exit with 1 and a list where they differ."""
    with _exit_codes():
        from megarl.convert.verifying import compare

        count, different = compare(
            hf,
            checkpoint,
            resources=_resources(memory_budget, processes),
            role=role,
            step=step,
            dtype=dtype,
            allow_pickle=allow_pickle,
        )
        if different:
            _stop("\n  ".join([f"{len(different)} of {count} tensors differ:", *different]), exit_code=1)
        typer.echo(f"{count} tensors are equal, bit for bit")


@app.command("inspect")
def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="See --checkpoint of export.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    role: Role = None,
    step: Step = None,
) -> None:
    """Print the tensors of a checkpoint, with their shapes, dtypes and sizes."""
    with _exit_codes():
        from megarl.convert import inspecting

        found = inspecting.inspect(checkpoint, role=role, step=step)
        typer.echo(json.dumps(found, indent=1) if as_json else inspecting.render(found))


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Ends the command with an error's message: exit code 2 for the user's mistakes, 1 for anything else."""
    from megarl.errors import RunError, UsageError
    from megarl.weights.hf_files import CheckpointError

    try:
        yield
    except UsageError as error:
        _stop(str(error), exit_code=2)
    except (CheckpointError, RunError) as error:
        _stop(str(error), exit_code=1)
    except OSError as error:
        _stop(f"{error.filename or 'a file'}: {error.strerror}", exit_code=1)


def _resources(memory_budget: str, processes: int) -> Resources:
    from megarl.convert.resources import Resources, parse_bytes

    return Resources(memory=parse_bytes("--memory-budget", memory_budget), processes=processes)


def _stop(message: str, *, exit_code: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(exit_code) from None
