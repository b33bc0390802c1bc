"""Parameter types of mixtures of experts: the matrices, and maybe biases, of all routed experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megarl.models.dims import Dims, Engine
from megarl.models.param_stacks import ShardCoords, Stack, TensorRange

MEGATRON_EXPERTS = "mlp.experts."
"""Prefix of the parameters of a layer's experts in Megatron."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a layer: gated MLPs without biases.

    Both engines have two parameters for all experts of a rank: [experts, gate shard; up shard,
    hidden] and [experts, hidden, channels of the shard].

    Args:
        module: HF's module of all experts; vLLM's parameters are in ``routed_experts`` of it.
        gate, up, down: HF's matrices of an expert.
    """

    module: str
    gate: str
    up: str
    down: str

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        experts = coords.experts(dims.experts)
        start, stop = coords.tp_range(dims.expert_ffn)
        if engine == "megatron":
            prefix = MEGATRON_EXPERTS
            names = ("linear_fc1.weight", "linear_fc2.weight")
        else:
            prefix = f"{self.module}.routed_experts."
            names = ("w13_weight", "w2_weight")
        for local, expert in enumerate(experts):
            tensors = f"{self.module}.{expert}."
            gate = TensorRange(f"{tensors}{self.gate}.weight", start, stop)
            up = TensorRange(f"{tensors}{self.up}.weight", start, stop)
            down = TensorRange(f"{tensors}{self.down}.weight", start, stop)
            yield Stack(
                param=prefix + names[0],
                shape=(gate.size + up.size, dims.hidden),
                parts=(gate, up),
                at=(local,),
                of=(len(experts),),
            )
            yield Stack(
                param=prefix + names[1],
                shape=(dims.hidden, down.size),
                parts=(down,),
                axis=1,
                at=(local,),
                of=(len(experts),),
            )

    def stacked(self, dims: Dims) -> dict[str, list[list[str]]]:
        """Returns the tensors in which files may have the matrices of all experts.

        These are [experts, gates and ups, hidden] and [experts, hidden, channels], as transformers has
        them in memory. See ``Manifest.stacks``.
        """
        both: list[list[str]] = []
        down: list[list[str]] = []
        for expert in range(dims.experts):
            tensors = f"{self.module}.{expert}."
            both.append([f"{tensors}{self.gate}.weight", f"{tensors}{self.up}.weight"])
            down.append([f"{tensors}{self.down}.weight"])
        return {f"{self.module}.gate_up_proj": both, f"{self.module}.down_proj": down}


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """The experts of a layer: gated MLPs with biases, in tensors of all experts as in gpt-oss.

    Files have [experts, hidden, gates and ups in turn] and [experts, channels, hidden], both engines
    the transposes, and biases [experts, gates and ups] and [experts, hidden]. In vLLM the first TP
    rank alone has the last ones.

    Args:
        module: HF's module of all experts.
        vllm: vLLM's.
    """

    module: str
    vllm: str

    def stacks(self, engine: Engine, dims: Dims, coords: ShardCoords) -> Iterator[Stack]:
        prefix = MEGATRON_EXPERTS
        names = ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")
        if engine == "vllm":
            prefix = self.vllm
            names = ("w13_weight", "w13_bias", "w2_weight", "w2_bias")
        up = f"{self.module}.gate_up_proj"
        down = f"{self.module}.down_proj"
        start, stop = coords.tp_range(dims.expert_ffn)
        rows = (2 * start, 2 * stop)
        output = TensorRange(f"{down}_bias", 0, dims.hidden)
        if engine == "vllm" and coords.tp_rank > 0:
            output = TensorRange(None, 0, dims.hidden)
        of_expert = (
            Stack(param="", shape=(2 * (stop - start), dims.hidden), parts=(TensorRange(up, *rows),), transposed=True),
            Stack(param="", shape=(2 * (stop - start),), parts=(TensorRange(f"{up}_bias", *rows),)),
            Stack(
                param="",
                shape=(dims.hidden, stop - start),
                parts=(TensorRange(down, start, stop),),
                axis=1,
                transposed=True,
            ),
            Stack(param="", shape=(dims.hidden,), parts=(output,)),
        )
        experts = coords.experts(dims.experts)
        for local, expert in enumerate(experts):
            for name, stack in zip(names, of_expert, strict=True):
                yield replace(
                    stack,
                    param=prefix + name,
                    at=(local,),
                    of=(len(experts),),
                    canonical_at=(expert,),
                )
