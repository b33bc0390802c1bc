"""What a run decides for its engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.models.lora import Adapters


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a run decides for its engines.

    Args:
        vocab_size: end of the ids that are sampled; at most the config's vocab_size.
        device: `cuda` or `cpu`.
        tokenizer: Hugging Face directory, for `rollout.stop`.
        weights: `sync` starts without weights, `files` with those in the model's directory.
        device_memory: bytes of which `rollout.gpu_memory_fraction` is a part, and which a cache
            without a configured size fills; None measures them.
        besides_cache: the most bytes that a GPU of an engine holds besides the cache while it has that.
        threads: threads of each process with device cpu.
        kept_max: most ids, from which a token was sampled, that are recorded; None records none.
        records_routes: whether responses have the experts of their tokens.
        adapters: adapters that vLLM applies; the weights then stay in later syncs, and asleep.
    """

    vocab_size: int
    device: str
    tokenizer: str | None = None
    weights: Literal["sync", "files"] = "sync"
    device_memory: int | None = None
    besides_cache: int = 0
    threads: int = 1
    kept_max: int | None = None
    records_routes: bool = False
    adapters: Adapters | None = None

    @property
    def drops_weights(self) -> bool:
        """Whether weights are dropped asleep, because the next sync brings all of them."""
        return self.weights == "sync" and self.adapters is None
