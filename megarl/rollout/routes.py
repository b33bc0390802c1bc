"""The experts that an engine's routers choose, for trainers that route by them.

On a GPU vLLM (0.32) returns them with a response (``enable_return_routed_experts``). On a CPU its
routers tell a recorder in each worker. vLLM's processes import this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megarl.models import ModelSpec

if TYPE_CHECKING:
    from vllm import RequestOutput

Routes = npt.NDArray[Any]
DISABLE = "set rollout.router_replay to false"
_ABANDONED_STEPS = 4
"""Steps after which the routes of a finished request are dropped that no response has taken."""


@contextmanager
def how_to_do_without_routes() -> Iterator[None]:
    """Adds the fix to errors of vLLM that cannot return experts, such as of some of its kernels."""
    try:
        yield
    except ValueError as error:
        if "routed" not in str(error):
            raise
        raise ValueError(f"{error}; {DISABLE}") from error


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
    dtype = route_dtype(model.dims.experts)
    found = recorded
    if found is None:
        returned = completion.routed_experts
        if returned is None or len(returned) not in (tokens - 1, tokens):
            count = 0 if returned is None else len(returned)
            raise RuntimeError(f"vLLM returned experts for {count} positions of {tokens} tokens; {DISABLE}")
        found = returned[:, list(model.table.mixtures)].astype(dtype)
    row = np.full((tokens - 1, *found.shape[1:]), np.iinfo(dtype).max, dtype=dtype)
    known = found[: tokens - 1]
    row[: len(known)] = known
    return row.reshape(-1)


class RouteRecorder:
    """Keeps the experts of every position that this worker computes, until a response takes them.

    A position that is computed again, as its request continues with new weights or makes room for
    others, has its last ones. Positions of a prefix that is in the cache have those with which it
    was computed, so that a response's experts do not depend on what an engine computed before.

    Args:
        runner: vLLM's model runner, whose steps are watched.
        layers: layers with experts.
        experts: number of experts of a layer.
    """

    def __init__(self, runner: Any, layers: Sequence[int], experts: int) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self._runner = runner
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._dtype = route_dtype(experts)
        self._step: dict[int, Routes] = {}
        self._cached: _CachedRoutes | None = None
        self._routes: dict[str, list[tuple[int, Routes]]] = {}
        self._finished: dict[str, int] = {}
        self._steps = 0
        found: set[int] = set()
        for module in runner.get_model().modules():
            if isinstance(module, MoERunner):
                router: Any = module.router
                router.set_capture_fn(partial(self._note, module.layer_id))
                found.add(module.layer_id)
        if found != set(layers):
            raise ValueError(f"vLLM's layers {sorted(found)} have routers, not {list(layers)}; {DISABLE}")
        self._execute: Callable[..., Any] = runner.execute_model
        runner.execute_model = self._execute_and_record

    def take(self, number: str) -> Routes:
        """Returns a request's experts, [positions, layers, experts of a token].

        vLLM (0.32) adds random characters to the number of a request.
        """
        for name in self._routes:
            if name == number or name.startswith(f"{number}-"):
                break
        else:
            raise ValueError(f"vLLM's routers told nothing of request {number}; {DISABLE}")
        parts = self._routes.pop(name)
        self._finished.pop(name, None)
        stop = max(first + len(part) for first, part in parts)
        _, part = parts[0]
        found = np.full((stop, *part.shape[1:]), np.iinfo(self._dtype).max, dtype=self._dtype)
        for first, part in parts:
            found[first : first + len(part)] = part
        return found

    def _note(self, layer: int, chosen: Any) -> None:
        self._step[self._index[layer]] = chosen.to("cpu").numpy().astype(self._dtype)

    def _execute_and_record(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        self._step.clear()
        result = self._execute(scheduled, *arguments, **options)
        if len(self._step) == len(self._index):
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
        """Adds a step's experts to the routes of its requests.

        Args:
            counts: number of positions that the step has computed, by request.
        """
        batch = self._runner.input_batch
        chosen = np.stack([self._step[index] for index in range(len(self._index))], axis=1)
        cache = self._prefix_cache(chosen.shape[1:])
        starting: list[tuple[int, str, int]] = []
        start = 0
        for index, name in enumerate(batch.req_ids):
            stop = start + counts[name]
            first = int(batch.num_computed_tokens_cpu[index])
            part = chosen[start:stop].copy()
            parts = self._routes.setdefault(name, [])
            known = parts[-1][0] + len(parts[-1][1]) if parts else 0
            # A new request, or one that is computed again, maybe behind a prefix that another request has computed.
            if not parts or first != known:
                starting.append((index, name, len(parts)))
            parts.append((first, part))
            if cache is not None:
                cache.write(index, first, part)
            start = stop
        if cache is None:
            return
        for index, name, place in starting:  # whose prefixes others may have computed in this step
            first, _ = self._routes[name][place]
            self._routes[name].insert(place, (0, cache.read(index, first)))

    def _prefix_cache(self, shape: tuple[int, ...]) -> _CachedRoutes | None:
        """Returns the experts of cached positions, of this shape each; None where no cache keeps all positions.

        Layers with windows have blocks of their own, and drop those that a window has left.
        """
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        if self._cached is not None:
            return self._cached
        config = self._runner.kv_cache_config
        for index, group in enumerate(config.kv_cache_groups):
            spec = group.kv_cache_spec
            if isinstance(spec, FullAttentionSpec):
                table = self._runner.input_batch.block_table[index]
                slots = config.num_blocks * spec.block_size
                none = np.iinfo(self._dtype).max
                routes = np.full((slots, *shape), none, dtype=self._dtype)
                self._cached = _CachedRoutes(table, routes)
                break
        return self._cached


class _CachedRoutes:
    """The experts with which the positions in vLLM's cache were computed.

    Args:
        table: vLLM's blocks of each request of a batch.
        routes: [slots of the cache, layers, experts of a token].
    """

    def __init__(self, table: Any, routes: Routes) -> None:
        self._table = table
        self._routes = routes

    def write(self, request: int, first: int, routes: Routes) -> None:
        """Notes the experts of a request's positions from ``first`` on."""
        self._routes[self._slots(request, first, first + len(routes))] = routes

    def read(self, request: int, stop: int) -> Routes:
        """Returns the experts of a request's positions before ``stop``."""
        return self._routes[self._slots(request, 0, stop)]

    def _slots(self, request: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        size = self._table.block_size
        positions = np.arange(start, stop)
        blocks = self._table.block_table.np[request, positions // size]
        return blocks * size + positions % size
