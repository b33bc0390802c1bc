"""The experts that an engine's routers choose, for trainers that route by them.

On a GPU vLLM (0.32) returns them with a response (``enable_return_routed_experts``). On a CPU its
routers tell a recorder in each worker. vLLM's processes import this file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megarl.models import ModelSpec

if TYPE_CHECKING:
    from vllm import RequestOutput

Routes = npt.NDArray[Any]
_ABANDONED_STEPS = 64
"""Steps after which the routes of a finished request are dropped that no response has taken."""


def route_dtype(experts: int) -> type[np.uint8] | type[np.uint16]:
    """Returns the dtype of ``RolloutChunk.routes``, whose largest number is no expert."""
    return np.uint8 if experts < np.iinfo(np.uint8).max else np.uint16


def records_routes(model: ModelSpec, device: str) -> bool:
    """Whether engines can record a model's routes; on a GPU vLLM (0.32) needs a prefix cache for it."""
    return model.dims.experts > 0 and (device == "cpu" or model.dims.delta is None)


def response_routes(output: RequestOutput, model: ModelSpec, recorded: Routes | None) -> Routes:
    """Returns a response's row of ``RolloutChunk.routes``.

    Args:
        recorded: what a ``RouteRecorder`` has of the request; None: vLLM's output has it.
    """
    completion = output.outputs[0]
    tokens = len(output.prompt_token_ids or ()) + len(completion.token_ids)
    found = recorded
    if found is None:
        assert completion.routed_experts is not None
        found = completion.routed_experts.astype(np.int32)
        if len(found) not in (tokens - 1, tokens):
            positions = f"{len(found)} positions of {tokens} tokens"
            fix = "set rollout.router_replay to false"
            raise RuntimeError(f"vLLM returned experts for {positions}; {fix}")
    layers: list[int] = []
    for layer, kind in enumerate(model.table.layers):
        if kind.is_mixture:
            layers.append(layer)
    dtype = route_dtype(model.dims.experts)
    none = np.iinfo(dtype).max
    row = np.full((tokens - 1, len(layers), found.shape[2]), none, dtype=dtype)
    known = found[: tokens - 1, layers]
    row[: len(known)] = np.where(known < 0, none, known)
    return row.reshape(-1)


class RouteRecorder:
    """Keeps the experts of every position that this worker computes, until a response takes them.

    Args:
        runner: vLLM's model runner, whose steps are watched.
        layers: number of the model's layers.
    """

    def __init__(self, runner: Any, layers: int) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self._runner = runner
        self._layers = layers
        self._step: dict[int, Routes] = {}
        self._routes: dict[str, list[tuple[int, Routes]]] = {}
        self._finished: dict[str, int] = {}
        self._steps = 0
        for module in runner.get_model().modules():
            if isinstance(module, MoERunner):
                router: Any = module.router
                router.set_capture_fn(partial(self._note, module.layer_id))
        self._execute: Callable[..., Any] = runner.execute_model
        runner.execute_model = self._execute_and_record

    def take(self, number: str) -> Routes:
        """Returns a request's experts, [positions, layers, experts of a token]; -1: not computed.

        vLLM (0.32) adds random characters to the number of a request.
        """
        (name,) = [name for name in self._routes if name == number or name.startswith(f"{number}-")]
        parts = self._routes.pop(name)
        self._finished.pop(name, None)
        stop = max(first + len(part) for first, part in parts)
        found = np.full((stop, *parts[0][1].shape[1:]), -1, dtype=np.int32)
        for first, part in parts:
            found[first : first + len(part)] = part
        return found

    def _note(self, layer: int, chosen: Any) -> None:
        self._step[layer] = chosen.to("cpu").numpy().astype(np.int32)

    def _execute_and_record(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        self._step.clear()
        result = self._execute(scheduled, *arguments, **options)
        if self._step:
            self._record(scheduled.num_scheduled_tokens)
        self._steps += 1
        for name in scheduled.finished_req_ids:
            self._finished.setdefault(name, self._steps)
        for name, step in list(self._finished.items()):
            if self._steps - step > _ABANDONED_STEPS:
                del self._finished[name]
                self._routes.pop(name, None)
        return result

    def _record(self, counts: dict[str, int]) -> None:
        batch = self._runner.input_batch
        chosen = next(iter(self._step.values()))
        every = np.full((len(chosen), self._layers, chosen.shape[1]), -1, dtype=np.int32)
        for layer, experts in self._step.items():
            every[:, layer] = experts
        start = 0
        for index, name in enumerate(batch.req_ids):
            stop = start + counts[name]
            first = int(batch.num_computed_tokens_cpu[index])
            self._routes.setdefault(name, []).append((first, every[start:stop]))
            start = stop
