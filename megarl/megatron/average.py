"""The moving average of a role's weights."""

from __future__ import annotations

import torch

from megarl.algos.mixing import ema
from megarl.megatron.model import RoleModel
from megarl.megatron.optimizer import Trainer
from megarl.megatron.shards import shards


class Average:
    """An exponential moving average in float32, divided over the ranks as the weights that the optimizer steps.

    Averages of 16-bit weights would stand still: what a step adds is less than their last digit. This one starts as a
    copy of the weights.

    Args:
        model: of the role.
        trainer: of the role.
        decay: what a step keeps of the average.
    """

    def __init__(self, model: RoleModel, trainer: Trainer, decay: float) -> None:
        self._model, self._trainer, self._decay = model, trainer, decay
        self.values = {shard.name: shard.main.detach().float().clone() for shard in shards(model, trainer)}
        """This rank's run of each parameter; see shards.Shard."""
        self.in_use = False
        """Whether the model has the average for its weights, and this keeps the weights."""

    @torch.no_grad()
    def update(self) -> None:
        """Takes note of an optimizer step."""
        for shard in shards(self._model, self._trainer):
            average = self.values[shard.name]
            average.copy_(ema(average, shard.main, decay=self._decay))

    @torch.no_grad()
    def use(self, wanted: bool) -> None:
        """Gives the model the average for its weights, or the weights again, bit for bit; collective.

        Args:
            wanted: which of the two; nothing happens where the model has it.
        """
        if wanted == self.in_use:
            return
        for shard in shards(self._model, self._trainer):
            kept = shard.main.detach().clone()
            shard.main.copy_(self.values[shard.name])
            self.values[shard.name].copy_(kept)
        self._trainer.publish()
        self.in_use = wanted
