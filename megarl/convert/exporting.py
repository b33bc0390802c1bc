"""From a checkpoint, Megatron-LM's or a run's, to a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from megarl.convert.chunks import Block, blocks
from megarl.convert.held import Held, open_held
from megarl.convert.locating import find
from megarl.convert.memory import Resources
from megarl.convert.models import model_of
from megarl.convert.parts import Part, grouped, part_bytes
from megarl.convert.staging import Staging
from megarl.convert.writing import write_parts
from megarl.types import RoleName
from megarl.weights.export import MAX_FILE_BYTES, SafetensorsFile, lay_out, write_index
from megarl.weights.shard_map import Shape, ShardMap, TensorInfo


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    resources: Resources,
    template: Path | None = None,
    role: RoleName | None = None,
    step: int | None = None,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    part_size: int | None = None,
) -> None:
    """Writes a Hugging Face directory with the weights of a checkpoint.

    Args:
        checkpoint: a path as of ``locating.find``.
        out: the directory to be; it appears when everything is in it. Continued if it was interrupted.
        resources: what may be used.
        template: an HF directory that says which model it is, where the checkpoint does not; its tokenizer is copied.
        role, step: as of ``locating.find``.
        dtype: of all weights; that of the checkpoint by default.
        max_file_bytes: tensors go to a next file where one would grow beyond this.
        part_size: bytes that are written, recorded and continued from together; chosen by the size by default.

    Raises:
        UsageError: it cannot be done as asked.
        BrokenError, BrokenCheckpointError: files are damaged, or their tensors are not the model's.
        PlanError: some elements of the model are in no file.
    """
    found = find(checkpoint, role=role, step=step)
    model = model_of(found, template)
    with Staging(out) as staging:
        found.check()
        held = open_held(found, model.spec, model.head)
        tensors = {name: replace(info, dtype=dtype or info.dtype) for name, info in held.tensors.items()}
        files = lay_out(tensors, max_file_bytes)
        block_bytes = resources.block_bytes(len(tensors), sum(info.nbytes for info in tensors.values()))
        write_parts(
            f"export {checkpoint.name}",
            staging,
            _parts(held, tensors, files, block_bytes, part_size),
            inputs={item.path for item in held.stored.values()},
            prepare=lambda output: _create(files, output),
            processes=resources.processes,
            scratch_bytes=block_bytes,
        )
        write_index(staging.output, files)
        model.write_sides(staging.output, _main_dtype(tensors))
        staging.publish()


def _parts(
    held: Held,
    tensors: Mapping[str, TensorInfo],
    files: Sequence[SafetensorsFile],
    block_bytes: int,
    part_size: int | None,
) -> list[Part]:
    """Runs of the files."""
    order = {file.name: file for file in files}
    file_of = {name: file.name for file in files for name in file.tensors}

    def at(block: Block) -> tuple[str, int]:
        """The file of a block, and its first byte there."""
        file = file_of[block.target]
        return file, order[file].offsets[block.target] + _first_byte(block, tensors[block.target].shape)

    size = part_size or part_bytes(sum(info.nbytes for info in tensors.values()))
    in_order = sorted(blocks(held.map, ShardMap.identity(tensors), block_bytes), key=at)
    return [
        Part(
            file=file,
            start=at(group[0])[1],
            archived=False,
            blocks=group,
            sources={name: held.stored[name] for block in group for name in block.sources},
        )
        for file, own in groupby(in_order, key=lambda block: file_of[block.target])
        for group in grouped(own, size)
    ]


def _first_byte(block: Block, shape: Shape) -> int:
    """Where a block begins in its tensor."""
    at = 0
    for extent, start in zip(shape, block.box.start, strict=True):
        at = at * extent + start
    return at * block.nbytes // block.box.size


def _create(files: Sequence[SafetensorsFile], output: Path) -> None:
    """Lays out the files, with headers and space for the data."""
    for file in files:
        with open(output / file.name, "wb") as stream:
            stream.write(file.header)
            stream.truncate(file.nbytes)


def _main_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The dtype of most bytes."""
    sizes: dict[str, int] = {}
    for info in tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max(sizes, key=sizes.__getitem__)
