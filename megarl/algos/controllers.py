"""Controllers of the KL coefficient: what a nat of divergence costs in the next step."""

from __future__ import annotations

import math
from typing import Protocol

MAX_ERROR = 0.2


class KLController(Protocol):
    """See AdaptiveKL."""

    @property
    def coef(self) -> float:
        """Reward or loss per nat."""
        ...

    def update(self, kl: float, samples: int) -> None:
        """Takes note of a step."""
        ...

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        ...

    def load(self, state: dict[str, float]) -> None:
        """Goes on from a checkpoint."""
        ...


class FixedKL:
    """The coefficient that the configuration gives."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, samples: int) -> None:
        """Nothing changes."""
        del kl, samples

    def state(self) -> dict[str, float]:
        """Nothing: the coefficient is the configuration's, of a resumed run too."""
        return {}

    def load(self, state: dict[str, float]) -> None:
        """Nothing to load."""
        del state


class AdaptiveKL:
    """Moves the coefficient in proportion to how far the divergence is from its target.

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon. Source: Ziegler et al., "Fine-tuning language
    models from human preferences" (2019). A divergence that is not a number leaves it.

    Args:
        coef: at the start, reward or loss per nat.
        target: of the mean divergence of a response, the sum over its tokens or their mean, nats.
        horizon: samples.
    """

    def __init__(self, coef: float, *, target: float, horizon: float) -> None:
        self.coef = coef
        self._target, self._horizon = target, horizon

    def update(self, kl: float, samples: int) -> None:
        """Takes note of a step, for the coefficient of the next.

        Args:
            kl: mean divergence of the step's responses, over all ranks, nats; of what the target is of.
            samples: of the step, over all ranks.
        """
        if math.isnan(kl):
            return
        error = min(max(kl / self._target - 1, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1 + error * samples / self._horizon

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"coef": self.coef}

    def load(self, state: dict[str, float]) -> None:
        """Goes on from a checkpoint."""
        self.coef = state["coef"]


def kl_controller(coef: float, *, target: float | None, horizon: float) -> KLController:
    """Fixed without a target, else adaptive."""
    return FixedKL(coef) if target is None else AdaptiveKL(coef, target=target, horizon=horizon)
