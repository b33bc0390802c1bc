"""The engines of a run: they share the samples of a step and return them by reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray

from megarl.cluster.calls import Call, Phase
from megarl.cluster.session import Session
from megarl.cluster.shell import ChunkRefs
from megarl.config import parse_devices
from megarl.config.schema import Rollout
from megarl.types import RolloutChunk, SampleInfo, SampleRequest

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
        """One response per request; waits until the driver knows their lengths.

        Args:
            requests: of the step; neighbours go to one engine, so that samples of one prompt share its prefix.
            chunks: into which to divide them, at most.
        """
        sizes = even_parts(len(requests), min(chunks, len(requests)))
        shares = [sizes[start:stop] for start, stop in itertools.pairwise(_bounds(len(sizes), len(self.processes)))]
        left = iter(requests)
        work = [
            (process, list(itertools.islice(left, sum(share))), share)
            for process, share in zip(self.processes, shares, strict=True)
            if share
        ]
        outputs: list[Any] = [
            process.actor.generate.options(num_returns=1 + len(share)).remote(own, share)
            for process, own, share in work
        ]
        watch = self._session.watch
        call = Call(
            label="rollout.generate",
            phase="rollout",
            processes=[process for process, _, _ in work],
            done=[infos for infos, *_ in outputs],
            watch=watch,
        )
        samples: list[SampleInfo] = []
        refs: list[ray.ObjectRef] = []
        for infos, (_, *parts) in zip(watch.follow(call).wait(), outputs, strict=True):
            samples += [replace(info, chunk=info.chunk + len(refs)) for info in infos]
            refs += parts
        return Rollouts(samples=tuple(samples), chunks=ChunkRefs(dict(enumerate(refs))))

    def call(self, phase: Phase, method: str, *args: Any) -> Call:
        """Calls a method on every engine with the same arguments."""
        shared = [args] * len(self.processes)
        return self._session.watch.submit(f"rollout.{method}", phase, method, self.processes, shared)

    def close(self) -> Call:
        """Ends the engines' own processes."""
        return self.call("start", "close")


def even_parts(count: int, parts: int) -> list[int]:
    """Divides a count into parts that differ by at most one."""
    return [stop - start for start, stop in itertools.pairwise(_bounds(count, parts))]


def _bounds(count: int, parts: int) -> list[int]:
    return [count * part // parts for part in range(parts + 1)]
