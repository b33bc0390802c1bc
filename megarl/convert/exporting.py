"""From a checkpoint, Megatron-LM's or a run's, to a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, PPOConfig, load
from megarl.convert.blocks import Block, group_blocks, plan_blocks, sources_of
from megarl.convert.find_checkpoint import HF_FILES, FoundCheckpoint, find_checkpoint
from megarl.convert.hf_source import read_spec
from megarl.convert.megatron_checkpoint import MegatronCheckpoint
from megarl.convert.resources import Resources
from megarl.convert.write_task import Staging, WriteTask, task_bytes
from megarl.errors import UsageError
from megarl.models import ModelSpec, model_spec
from megarl.types import RoleName
from megarl.weights.export import MAX_FILE_BYTES, SafetensorsFile, copy_side_files, lay_out, write_index, write_json
from megarl.weights.shard_map import Shape, ShardMap, TensorInfo

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
    """Writes a Hugging Face directory with the weights of a checkpoint.

    Args:
        checkpoint, role, step: as of ``find_checkpoint``.
        out: appears when it is complete. An interrupted export is continued.
        template: an HF directory of the model, where the checkpoint does not name one; its tokenizer is copied.
        dtype: of all weights; that of the checkpoint by default.
        max_file_bytes: tensors go to a next file where one would grow beyond this.
        max_task_bytes: bytes that are written and recorded together; chosen by the size by default.

    Raises:
        UsageError: it cannot be done as asked.
        CheckpointError, BrokenCheckpointError: files are damaged, or their tensors are not the model's.
        PlanError: some elements of the model are in no file.
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
    """The model of a checkpoint, by a template, or by what lies beside the checkpoint.

    Returns:
        The model, and directories with its tokenizer and generation files; later ones have precedence.

    Raises:
        UsageError: nothing says which model it is.
    """
    if template is None and found.kind == "megarl":
        return _model_of_run(found)
    directory = template or found.root / HF_FILES
    if template is None and not (directory / _HF_CONFIG).is_file():
        raise UsageError(
            f"{found.root} does not say which model it is of; name a directory that has its config.json and "
            "tokenizer with --hf"
        )
    return read_spec(directory), (directory,)


def _model_of_run(found: FoundCheckpoint) -> tuple[ModelSpec, tuple[Path, ...]]:
    """The model that a role began as, by the run's configuration."""
    path = found.root / "config.yaml"
    try:
        config = load(path)
        critic: str | None = None
        if isinstance(config, PPOConfig) and found.role == "critic" and config.critic is not None:
            critic = config.critic.path
        fields: Mapping[str, Any] = config.model.hf_config()
        spec = model_spec(fields) if critic is None else read_spec(Path(critic))
    except (ConfigError, OSError, ValueError) as error:
        raise UsageError(
            f"{path} does not lead to the model's config.json ({error}); name a directory that has it with --hf"
        ) from None
    directories = (config.model.path, config.model.tokenizer, critic)
    return spec, tuple(Path(directory) for directory in directories if directory is not None)


def _tasks(
    source: MegatronCheckpoint,
    tensors: Mapping[str, TensorInfo],
    files: Sequence[SafetensorsFile],
    block_bytes: int,
    max_task_bytes: int,
) -> list[WriteTask]:
    """Tasks that each write a run of a file."""
    file_of = {name: file for file in files for name in file.tensors}

    def place(block: Block) -> tuple[str, int]:
        """The file of a block, and its first byte there."""
        file = file_of[block.target]
        return file.name, file.offsets[block.target] + _first_byte(block, tensors[block.target].shape)

    in_order = sorted(plan_blocks(source.map, ShardMap.identity(tensors), block_bytes), key=place)
    return [
        WriteTask(
            file=file,
            start=place(group[0])[1],
            archived=False,
            blocks=group,
            sources=sources_of(group, source.stored),
        )
        for file, blocks in groupby(in_order, key=lambda block: file_of[block.target].name)
        for group in group_blocks(blocks, max_task_bytes)
    ]


def _first_byte(block: Block, shape: Shape) -> int:
    """Where a block begins in its tensor."""
    at = 0
    for extent, start in zip(shape, block.box.start, strict=True):
        at = at * extent + start
    return at * block.nbytes // block.box.size


def _create(files: Sequence[SafetensorsFile], output: Path) -> None:
    for file in files:
        file.create(output)


def _main_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The dtype of most bytes."""
    sizes: dict[str, int] = {}
    for info in tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max(sizes, key=sizes.__getitem__)
