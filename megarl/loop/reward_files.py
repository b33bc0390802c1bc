"""What a reward model's directory says of its scores: their scale, and how they were on held-out preferences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from megarl.algos.reward_shaping import ScoreScale

SCALE: Final = "reward_normalisation.json"
STATISTICS: Final = "reward_statistics.json"


def read_scale(directory: str | None) -> ScoreScale:
    """The scale of a reward model's scores; that which changes nothing where the directory has none."""
    file = None if directory is None else Path(directory) / SCALE
    return ScoreScale(**json.loads(file.read_text())) if file is not None and file.exists() else ScoreScale()


def write_scale(scale: ScoreScale, directory: Path) -> None:
    """Puts the scale beside a reward model, for whoever uses its scores; a critic made of it has none."""
    (directory / SCALE).write_text(json.dumps(asdict(scale)) + "\n")


@dataclass(frozen=True, kw_only=True)
class PreferenceStatistics:
    """How a reward model scores preferences, before any scale.

    Args:
        preferences: that were scored.
        accuracy: part of them whose best response scores more than every other.
        mean, std: of the scores of the best responses (``chosen``), of the others (``rejected``), and of the best one's
            lead over the next (``margin``); the deviation is that of the population.
    """

    preferences: int
    accuracy: float
    mean: Mapping[str, float]
    std: Mapping[str, float]

    @classmethod
    def of(cls, scores: npt.NDArray[np.float32]) -> PreferenceStatistics:
        """Those of [preferences, responses] scores, the best response first."""
        chosen, rejected = scores[:, 0].astype(np.float64), scores[:, 1:].astype(np.float64)
        margin = chosen - rejected.max(1)
        columns = {"chosen": chosen, "rejected": rejected, "margin": margin}
        return cls(
            preferences=len(scores),
            accuracy=float((margin > 0).mean()),
            mean={name: float(values.mean()) for name, values in columns.items()},
            std={name: float(values.std()) for name, values in columns.items()},
        )

    def write(self, directory: Path) -> None:
        """Puts them beside a reward model."""
        (directory / STATISTICS).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def metrics(self) -> dict[str, float]:
        """``held_out/*``."""
        named = {f"{name}_{kind}": value for kind in ("mean", "std") for name, value in getattr(self, kind).items()}
        return {f"held_out/{name}": value for name, value in {"accuracy": self.accuracy, **named}.items()}
