"""A role's state on disk: sharded tensors in canonical coordinates, in Megatron's checkpoint format.

Weights, their average and optimizer state are stored as boxes of Hugging Face tensors: any layout loads what any other
has saved, padding is not stored, and each element is written once. Megatron's own sharded state reads its global
parallel state, and gathers the optimizer's state over DP or ties it to TP and PP (optimizer/distrib_optimizer.py,
0.16). This file uses the default process group, which is the group's world.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from operator import sub
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as plan_save
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.futures import Future

from megarl.files import FileRecord, sync, write_errors
from megarl.megatron.model_engine import ModelEngine
from megarl.megatron.optimizer import OptimizerShard, shards
from megarl.megatron.parallel import barrier
from megarl.types import RankCoords
from megarl.weights.dcp_metadata import check_tensors_alone
from megarl.weights.hf_files import CheckpointError
from megarl.weights.shard_map import Box, Shard, row_major_boxes

_MOMENTS = ("exp_avg", "exp_avg_sq")
_COUNTERS = ("steps_taken", "adam_steps")
"""Attributes of an engine, equal on all of its ranks."""


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
    """Divides the writing of a role's state among its ranks; returns what does this rank's part, see `save_role`.

    Args:
        group: of the same ranks, for the write alone; what is written is then a copy in host memory, so that the write
            may run in a thread while the role is trained.
    """
    assert role.ema is None or not role.ema.in_use, f"{role.name} has its average for its weights"
    if dist.get_rank() == 0:
        directory.mkdir()
    barrier()
    state = {"counters": {name: getattr(role, name) for name in _COUNTERS}, **_tensors(role)}
    plan = _Plan(copies=group is not None)
    with _first_error(f"{role.name} cannot be saved"), write_errors(directory / "common.pt"):
        dist_checkpointing.save(state, str(directory), plan, validate_access_integrity=False)
    return partial(_write, role.name, plan.writer, directory, group)


def _write(name: str, writer: _PlannedWriter, directory: Path, group: dist.ProcessGroup | None) -> list[FileRecord]:
    with _first_error(f"{name} cannot be saved"):
        writer.write(group)
    rank = dist.get_rank()
    files = [path for path in sorted(directory.iterdir()) if _writer(path) == rank]
    for path in (*files, directory):
        sync(path)
    return [FileRecord.of(path, directory) for path in files]


def restore_role(role: ModelEngine, directory: Path) -> None:
    """Loads a role's state, saved under any layout; raises RuntimeError if it belongs to another model. Collective."""
    with _first_error(f"{role.name} cannot be restored from {directory}"):
        check_tensors_alone(directory)  # torch reads the pickle again, without restrictions (FileSystemReader, 2.13)
    counters = dist_checkpointing.load_common_state_dict(str(directory))["counters"]
    for name in _COUNTERS:
        setattr(role, name, counters[name])
    _set_adam_steps(role)
    with _first_error(f"{role.name} cannot be restored from {directory}"):
        # In place: the tensors are views of the parameters and of the optimizer's state.
        dist_checkpointing.load(_tensors(role), str(directory), validate_access_integrity=False)


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


class _PlannedWriter(FileSystemWriter):
    """Keeps the part that torch's saver gives this rank to write, and writes it when asked; errors name the file.

    Args:
        copies: what is written is a copy of the planned tensors in host memory, made before.
    """

    def __init__(self, directory: str | Path, *, copies: bool) -> None:
        # Copying ahead waits for the device's work, which is that of the training.
        super().__init__(directory, thread_count=1, sync_files=True, per_thread_copy_ahead=0)
        self._copies = copies
        self._part: tuple[Any, Any] | None = None
        self._metadata: Any = None

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._part = plan, _Copies(plan, planner, ahead=self._copies)
        nothing: Future[list[Any]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Any, results: Any) -> None:
        self._metadata = metadata

    def write(self, group: dist.ProcessGroup | None) -> None:
        """Writes this rank's file, and on the first rank the metadata of all; collective over the group."""
        _DistWrapper(group, use_dist=True, coordinator_rank=0).all_reduce("write", self._write_part, self._finish)

    def _write_part(self) -> Any:
        assert self._part is not None, "torch's saver plans first"
        (plan, planner), self._part = self._part, None
        tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
        nbytes = sum(tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize for tensor in tensors)
        with write_errors(Path(self.path) / f"{plan.storage_data.prefix}0.distcp", nbytes):
            return super().write_data(plan, planner).wait()

    def _finish(self, results: Any) -> None:
        with write_errors(Path(self.path) / ".metadata"):
            super().finish(self._metadata, results)


class _Copies:
    """Stands for a planner: gives the writer copies in host memory, and frees each when it asks for the next one.

    torch.save leaves what it has written to the garbage collector: its pickler is a class that is made for the call
    (torch/serialization.py, 2.13), and the copies of a whole checkpoint might wait there.

    Args:
        ahead: all are made now.
    """

    def __init__(self, plan: Any, planner: Any, *, ahead: bool) -> None:
        self._planner = planner
        self._tensors = {item.index: self._copy(item) for item in plan.items} if ahead else None
        self._written: Any = None

    def resolve_data(self, item: Any) -> Any:
        if isinstance(self._written, torch.Tensor):
            self._written.untyped_storage().resize_(0)
        self._written = self._copy(item) if self._tensors is None else self._tensors.pop(item.index)
        return self._written

    def _copy(self, item: Any) -> Any:
        data = self._planner.resolve_data(item)
        return data.detach().to("cpu", copy=True) if isinstance(data, torch.Tensor) else data  # or an object's bytes


class _Plan(SaveShardedStrategy):
    """Megatron's torch_dist format, written by the calling process itself; replicas over DP share the writing.

    Megatron's strategy copies everything and forks writers even for a synchronous save, and starts a queue manager that
    outlives it (dist_checkpointing/strategies/filesystem_async.py, 0.16).
    """

    writer: _PlannedWriter

    def __init__(self, *, copies: bool) -> None:
        super().__init__("torch_dist", 1)
        self._copies = copies

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        self.writer = _PlannedWriter(checkpoint_dir, copies=self._copies)
        plan_save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=self.writer,
            planner=MCoreSavePlanner(flatten_state_dict=False),  # torch has one rank write each box, the least busy
        )


def _writer(path: Path) -> int:
    """Returns the rank that wrote a file: ``__{rank}_{number}.distcp``, and rank 0 the others."""
    return int(path.name.split("_")[2]) if path.name.startswith("__") else 0


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


def _tensors(role: ModelEngine) -> dict[str, ShardedTensor]:
    """Returns all tensors of the role that this rank holds."""
    parameters, boxes = role.model.parameters(), _Boxes(role)
    tensors: list[ShardedTensor] = []
    for name, parameter in parameters.items():
        tensors += boxes.sharded("weight", name, parameter.detach().view(-1), range(parameter.numel()))
    for shard in _shards(role):
        state = {name: shard.adam[name] for name in _MOMENTS if name in shard.adam}
        if shard.main.dtype != parameters[shard.name].dtype:
            state["master"] = shard.main.detach()
        if role.ema is not None:
            state["average"] = role.ema.values[shard.name]
        for kind, values in state.items():
            tensors += boxes.sharded(kind, shard.name, values, shard.span)
    return {str(index): tensor for index, tensor in enumerate(tensors)}


class _Boxes:
    """Divides a rank's parameters into boxes of canonical tensors."""

    def __init__(self, role: ModelEngine) -> None:
        layout, self._role = role.layout, role
        self._tensors = role.spec.canonical(role.head)
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        for shard in role.shard_map.shards:
            self._shards[shard.param].append(shard)
        self._first_holder: dict[tuple[str, Box], RankCoords] = {}
        """The first rank of this replica that holds a region: tied weights, norms and the like are on several."""
        for pp, tp in product(range(layout.pp), range(layout.tp)):
            coords = replace(role.coords, pp=pp, tp=tp)
            for shard in role.spec.megatron_map(layout, layout.rank(coords), role.head).shards:
                self._first_holder.setdefault((shard.name, shard.region), coords)

    def sharded(self, kind: str, param: str, values: torch.Tensor, span: range) -> Iterator[ShardedTensor]:
        """Divides a run of a flattened parameter, or of its optimizer state, [len(span)]."""
        for box in row_major_boxes(self._role.shard_map.params[param].shape, span.start, span.stop):
            block, values = values[: box.size].view(box.shape), values[box.size :]
            for shard in self._shards[param]:
                part = shard.within(box)
                if part is None:
                    continue
                inside = Box(*(tuple(map(sub, edge, box.start)) for edge in (part.box.start, part.box.stop)))
                data = block[inside.slices]
                data = (data.mT if part.transposed else data).view(part.region.shape)
                # Ranks of one replica may hold other runs of the same region, so only the first of them writes it.
                holder = self._first_holder[shard.name, shard.region]
                yield ShardedTensor(
                    key=f"{kind}.{part.name}",
                    data=data,
                    dtype=data.dtype,
                    local_shape=tuple(data.shape),
                    global_shape=self._tensors[part.name].shape,
                    global_offset=part.region.start,
                    axis_fragmentations=None,
                    replica_id=int(holder != self._role.coords),
                )
