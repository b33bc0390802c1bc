"""The adapters of a running vLLM engine: one, of which all requests are, and whose buffers a sync writes.

vLLM (0.32) has a place for each adapter in buffers beside the weights, ``lora_a_stacked`` and
``lora_b_stacked`` of its layers, with the products scaled in B. Its own interface fills a place from
files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.models.lora import ADAPTER, Adapters
from megarl.weights.shard_map import Shape, ShardMap

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.lora.request import LoRARequest

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM (0.32) takes."""
LARGEST_RANK = _RANKS[-1]


def adapter_request() -> LoRARequest:
    """Returns the adapter of all requests; it has no files."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(
        lora_name="actor",
        lora_int_id=1,
        lora_path="/nonexistent",
    )


def largest_rank(rank: int) -> int:
    """Returns the smallest of vLLM's ranks for adapters of a rank up to ``LARGEST_RANK``."""
    return next(largest for largest in _RANKS if largest >= rank)


def activate_adapter(manager: Any) -> None:
    """Gives the adapter its place, with zeros; vLLM would else read files at the first request."""
    request = adapter_request()
    manager.add_dummy_lora(request, rank=1)
    manager._adapter_manager.activate_adapter(request.lora_int_id)


def adapter_settings(adapters: Adapters, shard_map: ShardMap) -> dict[str, Any]:
    """Returns vLLM's settings for adapters of a shard map."""
    layers = {name.partition(ADAPTER)[0].rpartition(".")[2] for name in shard_map.params if ADAPTER in name}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": largest_rank(adapters.rank),
        "lora_target_modules": sorted(layers),
    }


def adapter_buffer(model: nn.Module, name: str, shape: Shape) -> torch.Tensor:
    """Returns a matrix of the adapter by its name in shard maps, as a view of vLLM's buffer, which may be larger."""
    path, _, place = name.rpartition(ADAPTER)
    number, side = place.split(".")
    layer: Any = model.get_submodule(path)
    buffers = {"a": layer.lora_a_stacked, "b": layer.lora_b_stacked}[side]
    rows, columns = shape
    return buffers[int(number)][0, 0, :rows, :columns]
