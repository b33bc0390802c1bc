"""A layer does not keep the memory in which its weights arrive."""

from __future__ import annotations

import pytest

from megarl.rollout.engine import RolloutEngine
from tests.rollout.engine_process import EngineProcess

pytestmark = [pytest.mark.e2e]


def _weight_after_memory_is_reused(_engine: RolloutEngine) -> list[float]:
    """Of a layer that runs on its weights as they have arrived, once something else arrives there."""
    import torch

    from megarl.rollout.vllm_layers import Layer
    from megarl.weights.shard_map import TensorInfo

    module = torch.nn.Linear(2, 1, bias=False)

    def take(tensors: dict[str, torch.Tensor]) -> None:
        module.weight = torch.nn.Parameter(tensors["weight"], requires_grad=False)

    layer = Layer(module, {"weight": TensorInfo((1, 2), "float32")}, (), take)
    memory = torch.ones(4)
    layer.arrive("weight", memory[2:].view(1, 2))
    memory.zero_()
    return module.weight.flatten().tolist()


def test_a_layer_does_not_alias_the_receive_buffer(process: EngineProcess) -> None:
    assert process.apply(_weight_after_memory_is_reused) == [1.0, 1.0]
