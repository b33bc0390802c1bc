"""A rank's part of each parameter in the distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megarl.megatron.model import RoleModel
from megarl.megatron.optimizer import Trainer


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A rank's run of a parameter.

    Args:
        name: of the local parameter.
        span: the run, in the flattened parameter.
        main: what Adam steps, [len(span)]: a view of the parameter, or a float32 copy of a 16-bit one.
        optimizer: Megatron's.
    """

    name: str
    span: range
    main: torch.Tensor
    optimizer: Any

    @property
    def adam(self) -> dict[str, Any]:
        """The optimizer's state of the run; empty before the first step."""
        return self.optimizer.state.get(self.main, {})


def shards(model: RoleModel, trainer: Trainer) -> Iterator[Shard]:
    """This rank's shards; a rank may have none."""
    names = {parameter: name for name, parameter in model.parameters().items()}
    for megatron in trainer.optimizer.chained_optimizers:
        own: Any = megatron
        buckets = [bucket for by_dtype in own.gbuf_ranges for per_dtype in by_dtype.values() for bucket in per_dtype]
        for bucket in buckets:
            for parameter, ranges in bucket["param_map"].items():
                group, order = own.model_param_group_index_map[parameter]
                yield Shard(
                    name=names[parameter],
                    span=range(ranges["param"].start, ranges["param"].end),
                    main=own.optimizer.param_groups[group]["params"][order],
                    optimizer=own.optimizer,
                )
