"""The engines of a run: they share the samples of a step and return them by reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megarl.cluster.calls import Call, Phase
from megarl.cluster.queue import WorkQueue
from megarl.cluster.session import Session
from megarl.cluster.shell import ChunkRefs
from megarl.config import parse_devices
from megarl.config.schema import Rollout
from megarl.types import Ragged, RolloutChunk, SampleInfo, SampleRequest, WorkItem

ENGINE = "megarl.rollout.engine:RolloutEngine"


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The rollouts of a step: what the driver knows of the samples, and references to the chunks that hold them."""

    samples: tuple[SampleInfo, ...]
    chunks: ChunkRefs[RolloutChunk]


class RolloutGroup:
    """vLLM engines, each on ``rollout.tp`` devices.

    Args:
        session: where they run.
        rollout: sampling, lengths and memory.
        model_dir: Hugging Face directory of the model.
        vocab_size: ids that may be sampled lie below it.
        device: ``cuda`` or ``cpu``.
        tokenizer: Hugging Face directory of the tokenizer that reads stop strings; None where there are none.
        weights: ``sync`` starts without any, ``files`` with those of model_dir.
        target: ``package.module:Class`` of the engine.
    """

    def __init__(
        self,
        session: Session,
        rollout: Rollout,
        model_dir: str,
        *,
        vocab_size: int,
        device: str,
        tokenizer: str | None = None,
        weights: Literal["sync", "files"] = "sync",
        target: str = ENGINE,
    ) -> None:
        self._session = session
        self._sleeps = rollout.sleep
        self._queue = WorkQueue(session)
        devices = parse_devices(rollout.devices)
        self.processes = [
            session.launch(
                f"rollout engine {engine}",
                devices[engine * rollout.tp : (engine + 1) * rollout.tp],
                target,
                model_dir,
                rollout,
                engine_id=engine,
                vocab_size=vocab_size,
                device=device,
                tokenizer=tokenizer,
                weights=weights,
            )
            for engine in range(rollout.engines)
        ]

    def start(self) -> Call:
        """Starts vLLM in every engine; where weights come by sync, it has none until the first."""
        return self.call("start", "start")

    def generate(self, requests: Sequence[SampleRequest], chunks: int) -> Rollouts:
        """One response per request, the same whichever engine gives it; waits until the driver knows their lengths.

        Args:
            requests: of the step; neighbours go to one engine, so that samples of one prompt share its prefix.
            chunks: into which to divide them, at most; an engine that is through with one takes another.
        """
        count = min(chunks, len(requests))
        bounds = itertools.pairwise(len(requests) * chunk // count for chunk in range(count + 1))
        items = [
            WorkItem(chunk=chunk, requests=tuple(requests[start:stop])) for chunk, (start, stop) in enumerate(bounds)
        ]
        share = math.ceil(count / len(self.processes))
        call = self._session.watch.stream(
            "rollout.generate", "rollout", "generate", self.processes, (self._queue.offer(items), share)
        )
        parts = {infos[0].chunk: (infos, chunk) for answered in call.wait() for infos, chunk in answered}
        return Rollouts(
            samples=tuple(info for index in range(count) for info in parts[index][0]),
            chunks=ChunkRefs({index: chunk for index, (_, chunk) in sorted(parts.items())}),
        )

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[Ragged]:
        """Raw teacher-forced log-probabilities of the same sequences by every engine; waits for them.

        Returns:
            By engine, a row of T - 1 float32 nats per sequence of T ids: of its second token to its last.
        """
        return self.call("inference", "logprobs", token_ids).wait()

    def sleep(self) -> None:
        """Lets the engines give up their weights and caches, where ``rollout.sleep`` says so; waits for them."""
        self._move("rollout", "sleep")

    def wake_weights(self) -> None:
        """Gives the weights their memory back: the next thing to do is a sync. The counterpart of ``sleep``."""
        self._move("sync", "wake_weights")

    def wake_cache(self) -> None:
        """Gives the caches their memory back, after a sync: the engines can answer again."""
        self._move("sync", "wake_cache")

    def call(self, phase: Phase, method: str, *args: Any) -> Call:
        """Calls a method on every engine with the same arguments."""
        shared = [args] * len(self.processes)
        return self._session.watch.submit(f"rollout.{method}", phase, method, self.processes, shared)

    def close(self) -> Call:
        """Ends the engines' own processes."""
        return self.call("start", "close")

    def _move(self, phase: Phase, method: str) -> None:
        if self._sleeps:
            self.call(phase, method).wait()
