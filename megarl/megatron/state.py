"""A role's state on disk: boxes of canonical tensors, in the format of torch.distributed.checkpoint.

Weights, their average and optimizer state are stored as boxes of Hugging Face tensors: any layout
loads what any other has saved, padding is not stored, and each element is written once. Collectives
use the default process group, the world of the group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from megarl.files import FileRecord, sync, write_errors
from megarl.megatron.model_engine import ModelEngine
from megarl.megatron.optimizer import OptimizerShard, shards
from megarl.types import RankCoords
from megarl.weights.dcp_metadata import METADATA, check_tensors_alone
from megarl.weights.hf_files import CheckpointError
from megarl.weights.shard_map import Box, Shard, row_major_boxes

_MOMENTS = ("exp_avg", "exp_avg_sq")
_COUNTERS = ("steps_taken", "adam_steps")
"""Attributes of an engine, equal on all of its ranks."""
_COUNTERS_FILE = "common.pt"
_RANK_FILE = "__{}_0.distcp"
"""FileSystemWriter's name."""


def plan_save(
    role: ModelEngine, directory: Path, group: dist.ProcessGroup | None = None
) -> Callable[[], list[FileRecord]]:
    """Returns what writes a role's state; it is collective over the role's ranks.

    It returns the files that this rank has synced to disk, relative to the directory, and raises
    RuntimeError on all ranks if some rank cannot write.

    Args:
        directory: new directory on a file system that all ranks share.
        group: process group of the same ranks, for the write alone. The state is then copied to
            host memory, so that a thread may write it while the role is trained.
    """
    role.require_state()
    assert role.ema is None or not role.ema.in_use, f"{role.name} has its average for its weights"
    boxes = [box for box in _held(role) if box.written]
    planner = _SavePlanner(boxes, copied=group is not None)
    writer = _Writer(directory, {name: getattr(role, name) for name in _COUNTERS})

    def write() -> list[FileRecord]:
        with _first_error(f"{role.name} cannot be saved"):
            save_state({}, storage_writer=writer, planner=planner, process_group=group)
        rank = dist.get_rank()
        files = [directory / _RANK_FILE.format(rank)]
        if rank == 0:
            files += [directory / METADATA, directory / _COUNTERS_FILE]
        for path in (*files, directory):
            sync(path)
        return [FileRecord.of(path, directory) for path in files]

    return write


def restore_role(role: ModelEngine, directory: Path) -> None:
    """Loads a role's state, saved under any layout; collective.

    Raises RuntimeError if it belongs to another model.
    """
    role.require_state()
    with _first_error(f"{role.name} cannot be restored from {directory}"):
        # torch reads the pickle again, without restrictions (FileSystemReader, 2.13).
        check_tensors_alone(directory)
        counters = torch.load(directory / _COUNTERS_FILE, weights_only=True)["counters"]
        for name in _COUNTERS:
            setattr(role, name, counters[name])
        _set_adam_steps(role)
        # In place: the boxes are views of the parameters and of the optimizer's state.
        reader = FileSystemReader(directory)
        load_state({}, storage_reader=reader, planner=_LoadPlanner(_held(role)))


@contextmanager
def _first_error(what: str) -> Iterator[None]:
    """Raises the lowest rank's error: torch's BaseException of all of them would end a Ray actor."""
    try:
        yield
    except CheckpointException as error:
        rank = min(error.failures)
        cause, _ = error.failures[rank]
        raise RuntimeError(f"{what}: rank {rank}: {cause}") from cause
    except (OSError, CheckpointError) as error:
        raise RuntimeError(f"{what}: {error}") from error


class _HeldBox(NamedTuple):
    """A view of a box of a stored tensor on this rank, and whether this rank writes it."""

    index: MetadataIndex
    info: TensorWriteData
    data: Tensor
    written: bool


class _SavePlanner(DefaultSavePlanner):
    """Plans boxes, and gives each to the writer as a copy in host memory, until it takes the next one.

    torch.save leaves what it has written to the garbage collector: its pickler is a class that is
    made for the call (torch/serialization.py, 2.13), and the copies of a whole checkpoint might
    wait there. If they are ``copied``, all are copied now.
    """

    def __init__(self, boxes: Sequence[_HeldBox], *, copied: bool) -> None:
        super().__init__(flatten_state_dict=False)
        self.nbytes = sum(box.data.nbytes for box in boxes)
        self._copied = copied
        self._items: list[WriteItem] = []
        self._tensors: dict[MetadataIndex, Tensor] = {}
        for box in boxes:
            item = WriteItem(index=box.index, type=WriteItemType.SHARD, tensor_data=box.info)
            self._items.append(item)
            self._tensors[box.index] = box.data.to("cpu", copy=True) if copied else box.data
        self._written = torch.empty(0)

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        self._written.untyped_storage().resize_(0)
        self._written = self._tensors.pop(write_item.index)
        if not self._copied:
            self._written = self._written.to("cpu", copy=True)
        return self._written


class _Writer(FileSystemWriter):
    """Writes a file per rank, and those of all on the first; errors name the file."""

    def __init__(self, directory: Path, counters: Mapping[str, int]) -> None:
        # Copying ahead would wait for the work of training on the device.
        super().__init__(directory, per_thread_copy_ahead=0, overwrite=False)
        self._directory = directory
        self._counters = counters

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        with write_errors(self._directory / _RANK_FILE.format(dist.get_rank()), planner.nbytes):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        with write_errors(self._directory / _COUNTERS_FILE):
            torch.save({"counters": self._counters}, self._directory / _COUNTERS_FILE)
        with write_errors(self._directory / METADATA):
            super().finish(metadata, results)


class _LoadPlanner(DefaultLoadPlanner):
    """Reads boxes in place, from the stored ones that overlap with them."""

    def __init__(self, boxes: Sequence[_HeldBox]) -> None:
        super().__init__(flatten_state_dict=False)
        self._boxes = boxes
        self._tensors = {box.index: box.data for box in boxes}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for box in self._boxes:
            key = box.index.fqn
            stored: Any = self.metadata.state_dict_metadata.get(key)
            if stored is None:
                raise ValueError(f"it has no {key}")
            if stored.size != box.info.size:
                raise ValueError(f"{key} is {list(stored.size)} there, not {list(box.info.size)}")
            items += create_read_items_for_chunk_list(key, stored, [box.info.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensors[index]


def _set_adam_steps(role: ModelEngine) -> None:
    """Initializes the optimizer's state as after ``role.adam_steps`` steps, with moments of zero."""
    steps = role.adam_steps
    for shard in _shards(role):
        state = shard.optimizer.state
        state.pop(shard.main, None)
        if steps > 0:
            state[shard.main] = {name: torch.zeros_like(shard.main) for name in _MOMENTS}
        if not isinstance(shard.optimizer, torch.optim.Adam):  # the fused ones count by group
            for group in shard.optimizer.param_groups:
                group["step"] = steps
        elif steps > 0:
            fused = shard.optimizer.param_groups[0]["fused"]
            device = shard.main.device if fused else None
            state[shard.main]["step"] = torch.tensor(float(steps), device=device)


def _shards(role: ModelEngine) -> Iterator[OptimizerShard]:
    if role.optimizer is not None:
        yield from shards(role.model, role.optimizer)


def _runs(role: ModelEngine) -> Iterator[tuple[str, str, Tensor, range]]:
    """Yields this rank's values: their kind, the parameter, and their place in it, flattened."""
    parameters = {**role.model.parameters(), **role.model.adapters()}
    for name in role.saved_map(role.rank).params:
        parameter = parameters[name]
        yield "weight", name, parameter.detach().view(-1), range(parameter.numel())
    for shard in _shards(role):
        state = shard.optimizer.state.get(shard.main, {})
        for moment in _MOMENTS:
            if moment in state:
                yield moment, shard.name, state[moment], shard.span
        if shard.main.dtype != parameters[shard.name].dtype:
            yield "master", shard.name, shard.main.detach(), shard.span
        if role.ema is not None:
            yield "average", shard.name, role.ema.values[shard.name], shard.span


def _writers(role: ModelEngine) -> dict[tuple[str, Box], RankCoords]:
    """Returns the least busy of the ranks that hold each region of a tensor, as replicas and norms do."""
    layout = role.layout
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for pp, tp, ep in product(range(layout.pp), range(layout.tp), range(layout.ep)):
        replicas = range(ep, layout.dp, layout.ep)
        ranks = [layout.rank(RankCoords(tp=tp, dp=dp, pp=pp)) for dp in replicas]
        for shard in role.saved_map(ranks[0]).shards:
            holders[shard.name, shard.region] += ranks
    loads = [0] * layout.world_size
    writers: dict[tuple[str, Box], RankCoords] = {}
    for (name, region), ranks in holders.items():
        writer = min(ranks, key=loads.__getitem__)
        loads[writer] += region.size
        writers[name, region] = layout.coords(writer)
    return writers


def _held(role: ModelEngine) -> list[_HeldBox]:
    """Returns the boxes of all tensors of the role that this rank holds."""
    coords = role.coords
    tensors = role.saved_tensors
    saved_map = role.saved_map(role.rank)
    writers = _writers(role)
    shards_by_param: dict[str, list[Shard]] = defaultdict(list)
    for shard in saved_map.shards:
        shards_by_param[shard.param].append(shard)
    held: list[_HeldBox] = []
    for kind, param, values, span in _runs(role):
        offset = 0
        for box in row_major_boxes(saved_map.params[param].shape, span.start, span.stop):
            block = values[offset : offset + box.size].view(box.shape)
            offset += box.size
            for shard in shards_by_param[param]:
                part = shard.within(box)
                if part is None:
                    continue
                data = block[part.box.relative_to(box).slices]
                if part.transposed:
                    data = data.mT
                data = data.view(part.region.shape)
                writer = writers[shard.name, shard.region]
                if kind != "weight":
                    # Replicas divide it, and other ranks of TP or PP divide it in other places.
                    writer = replace(writer, dp=coords.dp)
                start = torch.Size(part.region.start)
                info = TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=start, sizes=data.shape),
                    properties=TensorProperties(dtype=data.dtype),
                    size=torch.Size(tensors[part.name].shape),
                )
                index = MetadataIndex(f"{kind}.{part.name}", start)
                held.append(_HeldBox(index=index, info=info, data=data, written=writer == coords))
    return held
