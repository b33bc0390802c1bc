"""Files of a reward model: the scale of its scores, and their statistics on held-out preferences."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from megarl.algos.reward_shaping import ScoreScale
from megarl.files import read_json
from megarl.types import FloatArray

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


def write_statistics(scores: FloatArray, directory: Path) -> dict[str, float]:
    """Writes statistics of raw scores into a model's directory; returns them as ``held_out/*``.

    They are the fraction of preferences whose best response scores higher than every other
    (``accuracy``), and mean and standard deviation (of the population) of the best responses'
    scores (``chosen``), of the others' (``rejected``) and of the difference between the best one's
    and the highest other one (``margin``).

    Args:
        scores: scores, [preferences, responses], the best response first.
    """
    chosen = scores[:, 0].astype(np.float64)
    rejected = scores[:, 1:].astype(np.float64)
    margin = chosen - rejected.max(1)
    columns = {"chosen": chosen, "rejected": rejected, "margin": margin}
    accuracy = float((margin > 0).mean())
    mean = {name: float(values.mean()) for name, values in columns.items()}
    std = {name: float(values.std()) for name, values in columns.items()}
    statistics = {"preferences": len(scores), "accuracy": accuracy, "mean": mean, "std": std}
    (directory / STATISTICS).write_text(json.dumps(statistics, indent=2) + "\n")
    metrics = {"held_out/accuracy": accuracy}
    metrics |= {f"held_out/{name}_mean": value for name, value in mean.items()}
    metrics |= {f"held_out/{name}_std": value for name, value in std.items()}
    return metrics
