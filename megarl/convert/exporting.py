"""From a checkpoint, Megatron-LM's or a run's, to a Hugging Face directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import mul
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, load
from megarl.convert.blocks import Block, group_blocks, plan_blocks, sources_of
from megarl.convert.find_checkpoint import HF_FILES, FoundCheckpoint, find_checkpoint
from megarl.convert.hf_source import read_spec
from megarl.convert.megatron_checkpoint import MegatronCheckpoint
from megarl.convert.resources import Resources
from megarl.convert.stored import row_major
from megarl.convert.write_task import Staging, WriteTask, task_bytes
from megarl.errors import UsageError
from megarl.models import ModelSpec, model_spec
from megarl.types import RoleName
from megarl.weights.export import MAX_FILE_BYTES, SafetensorsFile, copy_side_files, lay_out, write_index, write_json
from megarl.weights.shard_map import ITEM_BYTES, ShardMap, TensorInfo

_HF_CONFIG = "config.json"


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
    max_task_bytes: int | None = None,
) -> None:
    """Writes a Hugging Face directory with the weights of a checkpoint; continues an interrupted export.

    Args:
        checkpoint, role, step: see ``find_checkpoint``.
        out: appears when it is complete.
        template: an HF directory of the model, where the checkpoint does not name one; its tokenizer is copied.
        dtype: of all weights; that of the checkpoint by default.
        max_file_bytes: a file is closed before it would exceed this.
        max_task_bytes: bytes that are written and recorded together; chosen by the size by default.
    """
    found = find_checkpoint(checkpoint, role=role, step=step)
    spec, side_directories = _model_of(found, template)
    head = found.head(spec.head)
    with Staging(out) as staging:
        found.verify()
        source = MegatronCheckpoint.open(found, spec, head)
        tensors = {name: replace(info, dtype=dtype or info.dtype) for name, info in source.tensors.items()}
        files = lay_out(tensors, max_file_bytes)
        nbytes = sum(info.nbytes for info in tensors.values())
        block_bytes = resources.block_bytes(len(tensors), nbytes)
        staging.write(
            f"export {checkpoint.name}",
            _tasks(source, tensors, files, block_bytes, max_task_bytes or task_bytes(nbytes)),
            inputs={item.path for item in source.stored.values()},
            prepare=lambda output: _create(files, output),
            resources=resources,
            scratch_bytes=block_bytes,
        )
        write_index(staging.output, files)
        for directory in side_directories:
            copy_side_files(directory, staging.output)
        write_json(staging.output / _HF_CONFIG, replace(spec, dtype=_main_dtype(tensors)).hf_config(head))
        staging.publish()


def _model_of(found: FoundCheckpoint, template: Path | None) -> tuple[ModelSpec, tuple[Path, ...]]:
    """Returns a checkpoint's model, and directories with its tokenizer and generation files; later ones win."""
    if template is not None or found.kind == "megatron":
        directory = template or found.root / HF_FILES
        if template is None and not (directory / _HF_CONFIG).is_file():
            raise UsageError(
                f"{found.root} does not say which model it is of; name a directory that has its config.json and "
                "tokenizer with --hf"
            )
        return read_spec(directory), (directory,)
    path = found.root / "config.yaml"  # of the run, with the model from which the role started
    try:
        config = load(path)
        start = None if found.role is None else config.role_checkpoint(found.role)
        fields: Mapping[str, Any] = config.model.hf_config()
        spec = model_spec(fields) if start is None else read_spec(Path(start))
    except (ConfigError, OSError, ValueError) as error:
        raise UsageError(
            f"{path} does not lead to the model's config.json ({error}); name a directory that has it with --hf"
        ) from None
    directories = (config.model.path, config.model.tokenizer, start)
    return spec, tuple(Path(directory) for directory in directories if directory is not None)


def _tasks(
    source: MegatronCheckpoint,
    tensors: Mapping[str, TensorInfo],
    files: Sequence[SafetensorsFile],
    block_bytes: int,
    max_task_bytes: int,
) -> list[WriteTask]:
    """Returns tasks that each write a contiguous part of a file."""
    file_of = {name: file for file in files for name in file.tensors}

    def place(block: Block) -> tuple[str, int]:
        """Returns the file of a block, and its first byte there."""
        file = file_of[block.target]
        info = tensors[block.target]
        first = sum(map(mul, block.box.start, row_major(info.shape)))
        return file.name, file.offsets[block.target] + first * ITEM_BYTES[info.dtype]

    in_order = sorted(plan_blocks(source.map, ShardMap.identity(tensors), block_bytes), key=place)
    tasks: list[WriteTask] = []
    for file, blocks in groupby(in_order, key=lambda block: file_of[block.target].name):
        for group in group_blocks(blocks, max_task_bytes):
            sources = sources_of(group, source.stored)
            start = place(group[0])[1]
            tasks.append(WriteTask(file=file, start=start, archived=False, blocks=group, sources=sources))
    return tasks


def _create(files: Sequence[SafetensorsFile], output: Path) -> None:
    for file in files:
        file.create(output)


def _main_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """Returns the dtype of most bytes."""
    sizes: Counter[str] = Counter()
    for info in tensors.values():
        sizes[info.dtype] += info.nbytes
    return max(sizes, key=sizes.__getitem__)
