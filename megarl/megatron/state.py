"""A role's state on disk: boxes of canonical tensors, in the format of torch.distributed.checkpoint.

Weights, their average and optimizer state are stored as boxes of Hugging Face tensors: any layout loads what any other
has saved, padding is not stored, and each element is written once. This file uses the default process group, which is
the group's world.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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


def save_role(role: ModelEngine, directory: Path) -> list[FileRecord]:
    """Writes the state of a role, in training or not; collective over the role's ranks.

    Args:
        directory: to make; on a file system that all ranks share.

    Returns:
        The files that this rank wrote and synced to disk, relative to the directory.

    Raises:
        RuntimeError: some rank cannot write; on all ranks.
    """
    return plan_role(role, directory)()


def plan_role(
    role: ModelEngine, directory: Path, group: dist.ProcessGroup | None = None
) -> Callable[[], list[FileRecord]]:
    """Returns what writes this rank's part of a role's state, see `save_role`.

    Args:
        group: of the same ranks, for the write alone; what is written is then a copy in host memory, so that the write
            may run in a thread while the role is trained.
    """
    assert role.ema is None or not role.ema.in_use, f"{role.name} has its average for its weights"
    planner = _SavePlanner([box for box in _held(role) if box.written], copied=group is not None)
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
    """Loads a role's state, saved under any layout; raises RuntimeError if it belongs to another model. Collective."""
    with _first_error(f"{role.name} cannot be restored from {directory}"):
        check_tensors_alone(directory)  # torch reads the pickle again, without restrictions (FileSystemReader, 2.13)
        counters = torch.load(directory / _COUNTERS_FILE, weights_only=True)["counters"]
        for name in _COUNTERS:
            setattr(role, name, counters[name])
        _set_adam_steps(role)
        # In place: the boxes are views of the parameters and of the optimizer's state.
        load_state({}, storage_reader=FileSystemReader(directory), planner=_LoadPlanner(_held(role)))


@contextmanager
def _first_error(what: str) -> Iterator[None]:
    """Raises the lowest rank's error: torch raises all of them in a BaseException, which would end a Ray actor."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise RuntimeError(f"{what}: rank {rank}: {cause}") from cause
    except (OSError, CheckpointError) as error:
        raise RuntimeError(f"{what}: {error}") from error


class _HeldBox(NamedTuple):
    """A box of a stored tensor on this rank.

    Args:
        data: its elements, a view.
        written: by this rank; others may hold it as well.
    """

    index: MetadataIndex
    info: TensorWriteData
    data: torch.Tensor
    written: bool


class _SavePlanner(DefaultSavePlanner):
    """Plans boxes, and gives each to the writer as a copy in host memory, which is freed when it asks for the next one.

    torch.save leaves what it has written to the garbage collector: its pickler is a class that is made for the call
    (torch/serialization.py, 2.13), and the copies of a whole checkpoint might wait there.

    Args:
        copied: all are copied now.
    """

    def __init__(self, boxes: Sequence[_HeldBox], *, copied: bool) -> None:
        super().__init__(flatten_state_dict=False)
        self.nbytes = sum(box.data.nbytes for box in boxes)
        self._items = [WriteItem(index=box.index, type=WriteItemType.SHARD, tensor_data=box.info) for box in boxes]
        self._copied = copied
        self._tensors = {box.index: box.data.to("cpu", copy=True) if copied else box.data for box in boxes}
        self._written = torch.empty(0)

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        self._written.untyped_storage().resize_(0)
        tensor = self._tensors.pop(write_item.index)
        self._written = tensor if self._copied else tensor.to("cpu", copy=True)
        return self._written


class _Writer(FileSystemWriter):
    """Writes a file per rank, and those of all on the first; errors name the file."""

    def __init__(self, directory: Path, counters: Mapping[str, int]) -> None:
        # Copying ahead waits for the device's work, which is that of the training.
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

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._tensors[index]


def _set_adam_steps(role: ModelEngine) -> None:
    """Initializes the optimizer's state as after ``role.adam_steps`` steps, with moments of zero."""
    steps = role.adam_steps
    for shard in _shards(role):
        shard.optimizer.state.pop(shard.main, None)
        if steps > 0:
            shard.optimizer.state[shard.main] = {name: torch.zeros_like(shard.main) for name in _MOMENTS}
        if not isinstance(shard.optimizer, torch.optim.Adam):  # the fused ones count by group
            for group in shard.optimizer.param_groups:
                group["step"] = steps
        elif steps > 0:
            shard.optimizer.state[shard.main]["step"] = torch.tensor(float(steps))


def _shards(role: ModelEngine) -> Iterator[OptimizerShard]:
    """Empty for a role that is not in training."""
    return iter(()) if role.optimizer is None else shards(role.model, role.optimizer)


def _held(role: ModelEngine) -> list[_HeldBox]:
    """Returns the boxes of all tensors of the role that this rank holds."""
    parameters = role.model.parameters()
    divide = _Boxes(role)
    held: list[_HeldBox] = []
    for name, parameter in parameters.items():
        held += divide("weight", name, parameter.detach().view(-1), range(parameter.numel()))
    for shard in _shards(role):
        state = {name: shard.adam[name] for name in _MOMENTS if name in shard.adam}
        if shard.main.dtype != parameters[shard.name].dtype:
            state["master"] = shard.main.detach()
        if role.ema is not None:
            state["average"] = role.ema.values[shard.name]
        for kind, values in state.items():
            held += divide(kind, shard.name, values, shard.span)
    return held


class _Boxes:
    """Divides a rank's parameters into boxes of canonical tensors."""

    def __init__(self, role: ModelEngine) -> None:
        self._role = role
        self._tensors = role.spec.canonical(role.head)
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        for shard in role.shard_map.shards:
            self._shards[shard.param].append(shard)
        holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
        """Ranks by region: replicas, and several ranks of each where it is of tied weights, norms and the like."""
        layout = role.layout
        for pp, tp, ep in product(range(layout.pp), range(layout.tp), range(layout.ep)):
            ranks = [layout.rank(RankCoords(tp=tp, dp=dp, pp=pp)) for dp in range(ep, layout.dp, layout.ep)]
            for shard in role.spec.megatron_map(layout, ranks[0], role.head).shards:
                holders[shard.name, shard.region] += ranks
        loads = [0] * layout.world_size
        self._writers: dict[tuple[str, Box], RankCoords] = {}
        """The least busy of the ranks that hold a region."""
        for (name, region), ranks in holders.items():
            writer = min(ranks, key=loads.__getitem__)
            loads[writer] += region.size
            self._writers[name, region] = layout.coords(writer)

    def __call__(self, kind: str, param: str, values: torch.Tensor, span: range) -> Iterator[_HeldBox]:
        """Divides a run of a flattened parameter, or of its optimizer state, [len(span)]."""
        coords = self._role.coords
        for box in row_major_boxes(self._role.shard_map.params[param].shape, span.start, span.stop):
            block = values[: box.size].view(box.shape)
            values = values[box.size :]
            for shard in self._shards[param]:
                part = shard.within(box)
                if part is None:
                    continue
                inside = Box(*(tuple(map(sub, edge, box.start)) for edge in (part.box.start, part.box.stop)))
                data = block[inside.slices]
                data = (data.mT if part.transposed else data).view(part.region.shape)
                writer = self._writers[shard.name, shard.region]
                if kind != "weight":
                    # Replicas divide it, and other ranks of TP or PP divide it in other places.
                    writer = replace(writer, dp=coords.dp)
                start = torch.Size(part.region.start)
                yield _HeldBox(
                    index=MetadataIndex(f"{kind}.{part.name}", start),
                    info=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=start, sizes=data.shape),
                        properties=TensorProperties(dtype=data.dtype),
                        size=torch.Size(self._tensors[part.name].shape),
                    ),
                    data=data,
                    written=writer == coords,
                )
