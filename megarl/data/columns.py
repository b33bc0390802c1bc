"""What is known of the rollouts of a step before its experience is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self, TypeVar

from megarl.types import Ragged, SampleFacts

V_co = TypeVar("V_co", covariant=True)


class Selectable(Protocol[V_co]):
    """Something per chunk, of which a part of the chunks can be taken; fetched when it is asked for, perhaps."""

    def __getitem__(self, chunk: int, /) -> V_co: ...

    def only(self, chunks: Iterable[int], /) -> Self: ...


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns by chunk; each has a float32 row per sample, with a value per response token.

    Args:
        samples: what the driver knows of the samples.
        old_logprobs: nats, by the actor before the update; None where the engines' stand for them.
        ref_logprobs: nats, by the reference; None without one.
        values: by the critic before the update; None without one.
        dense: raw scores by the reward model, one more than response tokens: before the first one, and after each.
            None where a response has one score.
    """

    samples: Mapping[int, SampleFacts]
    old_logprobs: Selectable[Ragged] | None
    ref_logprobs: Selectable[Ragged] | None
    values: Selectable[Ragged] | None
    dense: Selectable[Ragged] | None

    def only(self, chunks: Iterable[int]) -> Columns:
        """Those of these chunks alone."""
        own = tuple(chunks)
        parts: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tokens = {
            name: None if column is None else column.only(own) for name, column in parts.items() if name != "samples"
        }
        return Columns(samples={chunk: self.samples[chunk] for chunk in own}, **tokens)
