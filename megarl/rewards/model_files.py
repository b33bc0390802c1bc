"""Files of a reward model: the scale of its scores, and their statistics on held-out preferences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megarl.algos.reward_shaping import ScoreScale
from megarl.files import read_json

SCALE: Final = "reward_normalisation.json"
STATISTICS: Final = "reward_statistics.json"


def read_scale(directory: str | None) -> ScoreScale:
    """Returns the scale of a reward model's scores; an OSError or ValueError if its file is broken."""
    if directory is None or not (Path(directory) / SCALE).exists():
        return ScoreScale()
    file = Path(directory) / SCALE
    fields: Any = read_json(file)
    try:
        return ScoreScale(**{name: float(value) for name, value in fields.items()})
    except (AttributeError, TypeError, ValueError):
        fix = "export the reward model again"
        raise ValueError(f"{file} does not hold the numbers of a scale; {fix}") from None


def write_scale(scale: ScoreScale, directory: Path) -> None:
    """Writes the scale into a reward model's directory; a critic that starts from the model ignores it."""
    (directory / SCALE).write_text(json.dumps(asdict(scale)) + "\n")


@dataclass(frozen=True, kw_only=True)
class PreferenceStatistics:
    """Statistics of a reward model's raw scores of preferences.

    Args:
        preferences: number of preferences.
        accuracy: fraction whose best response scores higher than every other.
        mean, std: moments of the scores of the best responses (``chosen``), of the others
            (``rejected``), and of the difference between the best one and the highest other
            (``margin``); std is the population's.
    """

    preferences: int
    accuracy: float
    mean: Mapping[str, float]
    std: Mapping[str, float]

    @classmethod
    def of(cls, scores: npt.NDArray[np.float32]) -> PreferenceStatistics:
        """Computes the statistics of scores, [preferences, responses], the best response first."""
        chosen = scores[:, 0].astype(np.float64)
        rejected = scores[:, 1:].astype(np.float64)
        margin = chosen - rejected.max(1)
        columns = {"chosen": chosen, "rejected": rejected, "margin": margin}
        return cls(
            preferences=len(scores),
            accuracy=float((margin > 0).mean()),
            mean={name: float(values.mean()) for name, values in columns.items()},
            std={name: float(values.std()) for name, values in columns.items()},
        )

    def write(self, directory: Path) -> None:
        """Writes the statistics into a reward model's directory."""
        (directory / STATISTICS).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def metrics(self) -> dict[str, float]:
        """``held_out/*``."""
        metrics = {"held_out/accuracy": self.accuracy}
        metrics |= {f"held_out/{name}_mean": value for name, value in self.mean.items()}
        metrics |= {f"held_out/{name}_std": value for name, value in self.std.items()}
        return metrics
