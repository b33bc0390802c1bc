"""``megarl convert import | export | merge | verify | inspect``; the same as ``python -m tools.checkpoint_convert``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from megarl.convert.resources import Resources
from megarl.errors import RunError, UsageError
from megarl.files import format_bytes

app = typer.Typer(
    name="convert",
    help="Convert checkpoints between Hugging Face's layout and Megatron-LM's; export, verify and inspect them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str | int) -> int:
    """Parses a size, such as ``512MiB``, ``4GiB`` or ``5GB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", f"{text}")
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise typer.BadParameter(f"{text!r} is not a size; write one like 512MiB, 4GiB or 5GB")
    return int(float(match[1]) * _UNITS[match[2]])


_SIZE: dict[str, Any] = {"parser": parse_bytes, "metavar": "SIZE"}
DtypeName = Literal["float64", "float32", "float16", "bfloat16"]
RoleName = Literal["actor", "critic", "reference", "reward"]
"""As of megarl.types, whose records would load numpy for every command."""
HF = Annotated[Path, typer.Option(help="Hugging Face directory: config.json and weights.")]
Template = Annotated[Path | None, typer.Option(help="Model's directory, if it names none itself.")]
From = Annotated[Path, typer.Option(help="Save directory of Megatron-LM, run, or one checkpoint.")]
Out = Annotated[Path, typer.Option(help="Directory to make; it appears when it is complete.")]
Role = Annotated[RoleName | None, typer.Option(help="Role of a run; its actor by default.")]
Step = Annotated[int | None, typer.Option(min=0, help="Which checkpoint; the latest by default.")]
Dtype = Annotated[DtypeName | None, typer.Option(help="Cast the weights; their own by default.")]
Budget = Annotated[int, typer.Option(**_SIZE, show_default="16GiB", help="Memory of all processes.")]
Processes = Annotated[int, typer.Option(min=1, help="Most processes; memory may allow fewer.")]
MaxFileSize = Annotated[int, typer.Option(**_SIZE, show_default=False, help="Size of a file, as 5GB.")]


@app.command("import")
def import_(
    hf: HF,
    out: Out,
    dtype: Dtype = None,
    max_file_size: MaxFileSize = 1 << 30,
    memory_budget: Budget = Resources.memory,
    processes: Processes = Resources.processes,
) -> None:
    """Make a Megatron checkpoint, which any layout loads, of a Hugging Face directory."""
    with _exit_codes():
        from megarl.convert.importing import import_checkpoint

        resources = Resources(memory=memory_budget, processes=processes)
        import_checkpoint(hf, out, resources=resources, dtype=dtype, max_file_bytes=max_file_size)
        typer.echo(f"{out} is complete")


@app.command("export")
def export(
    checkpoint: From,
    out: Out,
    hf: Template = None,
    role: Role = None,
    step: Step = None,
    dtype: Dtype = None,
    max_file_size: MaxFileSize = 5 * 10**9,
    memory_budget: Budget = Resources.memory,
    processes: Processes = Resources.processes,
) -> None:
    """Make a Hugging Face directory of a checkpoint, Megatron-LM's or a run's; of adapters, in PEFT's format."""
    with _exit_codes():
        from megarl.convert.exporting import export_checkpoint

        export_checkpoint(
            checkpoint,
            out,
            resources=Resources(memory=memory_budget, processes=processes),
            template=hf,
            role=role,
            step=step,
            dtype=dtype,
            max_file_bytes=max_file_size,
        )
        typer.echo(f"{out} is complete")


@app.command("merge")
def merge(
    hf: HF,
    adapters: Annotated[Path, typer.Option(help="Adapters, in PEFT's format.")],
    out: Out,
    dtype: Dtype = None,
    max_file_size: MaxFileSize = 5 * 10**9,
    memory_budget: Budget = Resources.memory,
    processes: Processes = Resources.processes,
) -> None:
    """Make a Hugging Face directory of a model with adapters (LoRA) merged into its weights."""
    with _exit_codes():
        from megarl.convert.merging import merge_adapters

        resources = Resources(memory=memory_budget, processes=processes)
        merge_adapters(
            hf,
            adapters,
            out,
            resources=resources,
            dtype=dtype,
            max_file_bytes=max_file_size,
        )
        typer.echo(f"{out} is complete")


@app.command("verify")
def verify(
    hf: HF,
    checkpoint: From,
    role: Role = None,
    step: Step = None,
    dtype: Dtype = None,
    memory_budget: Budget = Resources.memory,
    processes: Processes = Resources.processes,
) -> None:
    """Compare a checkpoint with a Hugging Face directory, bit for bit; exit with 1 and a list where they differ."""
    with _exit_codes():
        from megarl.convert.exporting import compare

        resources = Resources(memory=memory_budget, processes=processes)
        count, different = compare(hf, checkpoint, resources=resources, role=role, step=step, dtype=dtype)
        if different:
            _stop("\n  ".join([f"{len(different)} of {count} tensors differ:", *different]), exit_code=1)
        typer.echo(f"{count} tensors are equal, bit for bit")


@app.command("inspect")
def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="See --checkpoint of export.")],
    role: Role = None,
    step: Step = None,
) -> None:
    """Print the tensors of a checkpoint, with their dtypes, shapes and numbers of chunks."""
    with _exit_codes():
        from megarl.convert.dcp import DCPIndex
        from megarl.convert.megatron_checkpoint import find_checkpoint

        found = find_checkpoint(checkpoint, role=role, step=step)
        index = DCPIndex.read(found.directory)
        chunks = Counter(chunk.key for chunk in index.chunks)
        nbytes = sum(chunk.place.length for chunk in index.chunks)
        typer.echo(f"{found.directory}: {len(index.tensors)} tensors, {format_bytes(nbytes)}")
        for key, info in sorted(index.tensors.items()):
            typer.echo(f"  {key}  {info.dtype}  {list(info.shape)}  chunks: {chunks[key]}")


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Ends the command with an error's message: exit code 2 for the user's mistakes, 1 for anything else."""
    from megarl.weights.hf_files import CheckpointError

    try:
        yield
    except UsageError as error:
        _stop(str(error), exit_code=2)
    except (CheckpointError, RunError) as error:
        _stop(str(error), exit_code=1)
    except OSError as error:
        _stop(f"{error.filename or 'a file'}: {error.strerror}", exit_code=1)


def _stop(message: str, *, exit_code: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(exit_code) from None
