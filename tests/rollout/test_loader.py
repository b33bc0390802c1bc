"""vLLM's half of every shard map against vLLM's own loader, on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.models import model_spec
from megarl.rollout.vllm_environment import scratch_directory, set_vllm_environment
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import FAMILIES, family
from tests.rollout.vllm_loader import Copied, copied_boxes

pytestmark = [pytest.mark.e2e]


def _loaded(_engine: Any, config: dict[str, Any], tp: int) -> tuple[list[set[Copied]], list[set[Copied]]]:
    """By rank, what vLLM's loader copies, and what the map says."""
    scratch = scratch_directory()
    set_vllm_environment("cpu", scratch.name)
    spec = model_spec(config)
    config = spec.hf_config()
    loaders: list[set[Copied]] = []
    maps: list[set[Copied]] = []
    for rank in range(tp):
        loaders.append(copied_boxes(config, spec.canonical(), tp, rank))
        mapped: set[Copied] = set()
        shard_map = spec.vllm_map(tp, rank)
        for shard in shard_map.shards:
            dtype = shard_map.params[shard.param].dtype
            mapped.add((shard.param, dtype, shard.box, shard.name, shard.region))
        maps.append(mapped)
    return loaders, maps


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_rank_loads_what_its_map_says(process: EngineProcess, kind: str, tp: int) -> None:
    loaders, maps = process.apply(_loaded, family(kind, dtype="bfloat16").to_dict(), tp)
    for rank, (loader, mapped) in enumerate(zip(loaders, maps, strict=True)):
        assert loader == mapped, f"rank {rank}"
