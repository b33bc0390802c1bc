"""Jobs of ranks: Megatron's own loading and saving of its modules."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megarl.types import Layout
from tests.convert.directories import read_directory


def load(rank: int, config: dict[str, Any], layout: Layout, directory: str, hf: str) -> int:
    """Loads a checkpoint into Megatron's model, by Megatron's sharded state, and compares it with the tensors of HF.

    Returns:
        The number of parameters that were compared.
    """
    from megatron.core import dist_checkpointing

    spec, model, sharded = _model(rank, config, layout)
    loaded: Any = dist_checkpointing.load(sharded, directory)
    for name, chunk in _chunks(model).items():
        chunk.load_state_dict(loaded[name], strict=True)
    tensors, parameters = read_directory(Path(hf)), model.parameters()
    expected = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for shard in spec.megatron_map(layout, rank, spec.head).shards:
        values = tensors[shard.name][shard.region.slices]
        values = values.T if shard.transposed else values
        expected[shard.param][shard.box.slices] = values.reshape(shard.box.shape)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name]), name
    return len(parameters)


def save(rank: int, config: dict[str, Any], layout: Layout, directory: str, hf: str, metadata: dict[str, Any]) -> None:
    """Saves Megatron's model with the tensors of HF, by Megatron's sharded state.

    Args:
        metadata: what Megatron's modules are asked for in their sharded state.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    spec, model, _ = _model(rank, config, layout)
    tensors, parameters = read_directory(Path(hf)), model.parameters()
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(float("nan"))  # what padding holds must not matter
        for shard in spec.megatron_map(layout, rank, spec.head).shards:
            values = tensors[shard.name][shard.region.slices]
            values = values.T if shard.transposed else values
            parameters[shard.param][shard.box.slices] = values.reshape(shard.box.shape)
    if rank == 0:
        Path(directory).mkdir(parents=True)
    torch.distributed.barrier()
    state = {**_sharded(model, metadata), "checkpoint_version": 3.0, "iteration": 7}
    # In place of a queue of a process of its own, which would outlive this one.
    with patch.object(filesystem_async, "get_write_results_queue", queue.Queue):
        dist_checkpointing.save(state, directory, content_metadata=metadata)


def _model(rank: int, config: dict[str, Any], layout: Layout) -> tuple[Any, Any, Any]:
    """The spec, this rank's chunks, and Megatron's description of what they hold."""
    from megarl.megatron.model import build_model
    from megarl.megatron.parallel import GroupCache, build_groups
    from megarl.models import model_spec

    spec = model_spec(config)
    groups = build_groups(layout, rank, GroupCache())
    dtype = getattr(torch, spec.dtype)
    model = build_model(spec, layout, groups, head=spec.head, dtype=dtype, trainable=False)
    return spec, model, _sharded(model, {})


def _chunks(model: Any) -> dict[str, Any]:
    """By the names that Megatron-LM gives them."""
    if len(model.chunks) == 1:
        return {"model": model.chunks[0]}
    return {f"model{i}": chunk for i, chunk in enumerate(model.chunks)}


def _sharded(model: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Megatron's sharded state; of tied embeddings it reads the global rank, which Megatron-LM's programs have set."""
    from megatron.core import parallel_state

    metadata = {**metadata, "dp_cp_group": model.groups.dp_cp}
    with patch.object(parallel_state, "_MPU_DATA_PARALLEL_RANK", model.groups.dp_cp.rank()):
        return {name: chunk.sharded_state_dict(metadata=dict(metadata)) for name, chunk in _chunks(model).items()}
