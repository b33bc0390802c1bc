"""vLLM's half of every shard map against vLLM's own loader, on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.rollout.loader_map import first_difference
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import FAMILIES, family

pytestmark = [pytest.mark.e2e]


def _difference(_engine: Any, config: dict[str, Any], tp: int) -> str | None:
    return first_difference(config, tp)


def _difference_of_wrong(_engine: Any, config: dict[str, Any], names: tuple[str, str]) -> str | None:
    """With a map that has two shards in each other's place, or one transposed."""
    from dataclasses import replace
    from unittest import mock

    from megarl.models import ModelSpec

    right = ModelSpec.vllm_map

    def swapped(spec: ModelSpec, tp: int, rank: int) -> Any:
        found = right(spec, tp, rank)
        one, other = (next(shard for shard in found.shards if shard.name == name) for name in names)
        shards = [shard for shard in found.shards if shard not in (one, other)]
        if one == other:
            return replace(found, shards=(*shards, one._replace(transposed=not one.transposed)))
        return replace(found, shards=(*shards, one._replace(name=other.name), other._replace(name=one.name)))

    with mock.patch.object(ModelSpec, "vllm_map", swapped):
        return first_difference(config, 1)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_rank_loads_what_its_map_says(process: EngineProcess, kind: str, tp: int) -> None:
    assert process.apply(_difference, family(kind).to_dict(), tp) is None


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")),
        ("gpt2", ("transformer.h.0.attn.c_proj.weight",) * 2),
    ],
)
def test_a_wrong_map_is_found(process: EngineProcess, kind: str, names: tuple[str, str]) -> None:
    difference = process.apply(_difference_of_wrong, family(kind).to_dict(), names)
    assert difference is not None
    assert f"rank 0 of TP 1: only vLLM's loader has {names[0]}[0:" in difference
