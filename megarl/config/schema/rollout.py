"""Generation with vLLM, and how the weights get there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.devices import parse_devices
from megarl.config.schema.base import Count, Devices, Natural, Positive, Section


class Rollout(Section):
    """Generation with vLLM: one engine for every tp devices."""

    devices: Devices
    """Devices of the engines; a group may have them too."""
    tp: Count = 1
    """Tensor parallel size of each engine."""
    temperature: Positive = 1.0
    """Divides the logits, in the trainers too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 is all."""
    top_k: Count | None = None
    """Sample from this many likeliest tokens; null is all."""
    min_new_tokens: Natural = 0
    """Tokens of a response before which no end token is sampled."""
    max_new_tokens: Count
    """Tokens of a response, at most."""
    stop: tuple[str, ...] = Field(default=(), strict=False)
    """Texts that end a response; the tokens that complete one stay in the response. Needs a tokenizer."""
    stop_token_ids: tuple[Natural, ...] = Field(default=(), strict=False)
    """Token ids that end a response, besides the model's end tokens."""
    max_model_len: Count
    """Tokens of prompt and response together, at most."""
    quantization: Literal["fp8_per_channel"] | None = None
    """Compute the engines' linear layers in float8: a scale per output channel and per token; null does not."""
    kv_cache_mib: Count = 4096
    """Memory of the key-value cache of each engine rank, MiB."""
    sleep: bool = False
    """Let the engines give up their weights and caches while the trainers work: needed where they share devices."""
    sync_every: Count = 1
    """Steps between transfers of the weights into the engines: rollouts are up to this many steps old, less one."""
    record: str | None = None
    """Directory to write each step's rollouts to."""
    replay: str | None = None
    """Directory of recorded rollouts: the steps that it has are trained on instead of generated."""

    @property
    def engines(self) -> int:
        """Engines that the devices hold."""
        return len(parse_devices(self.devices)) // self.tp


class LogprobGate(Section):
    """After the first sync and after a resume, trainer and engines must agree on the log-probabilities of a probe."""

    sequences: Count = 16
    """Random sequences that both score, teacher-forced."""
    tokens: Annotated[int, Field(ge=2)] = 32
    """Tokens of each, at most."""
    max_mean_abs_diff: Positive | None = None
    """Largest mean absolute difference, nats; null is 1e-4 for float32 and 0.05 for bfloat16."""


class Resharding(Section):
    """The transfer of the actor's weights into the engines."""

    bucket_mib: Positive = 256.0
    """Memory of a bucket, MiB. A rank of an engine receives into two, and a trainer's sends from two where it cannot
    write there. Larger parameters come in parts, which an engine puts together first where vLLM packs them."""
    verify: bool = True
    """Send and check a checksum with every message."""
    transport: Literal["auto", "gloo", "shared_memory"] = "auto"
    """How messages travel; auto takes the fastest way between each two processes, the others are for device cpu."""
    gate: LogprobGate | None = LogprobGate()
    """Agreement that a run must show before it trains; null does not look."""
