"""What vLLM's worker processes import: it makes our weight-transfer engine known to vLLM, by the name ``megarl``.

vLLM mixes :class:`WorkerExtension` into its worker class by name (``worker_extension_cls``), in its own process as in
those that it spawns, and before it makes the engine. Only small plain data crosses ``collective_rpc``: specs, names,
numbers. Tensors arrive through the transport.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from megarl.rollout.weight_receiver import Outcome, ShardTransfer

BACKEND = "megarl"

WeightTransferEngineFactory.register_engine(BACKEND, ShardTransfer)


class WorkerExtension:
    """What vLLM's worker does not pass on to its weight-transfer engine, or from it; ``self`` is the worker."""

    def megarl_call(self: Any, method: str, *args: Any) -> Outcome:
        """Calls a method of the engine that vLLM does not know; what it came to."""
        getattr(self.weight_transfer_engine, method)(*args)
        return self.weight_transfer_engine.outcome

    def megarl_outcome(self: Any) -> Outcome:
        """What the engine's last call came to."""
        return self.weight_transfer_engine.outcome
