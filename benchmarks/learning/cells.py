"""The runs of the learning benchmark: what trains with which seed, and where its result is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megarl.config.inheritance import merged

CONFIGS: Final = Path("configs/learning")
RESULTS: Final = Path("benchmarks/results/learning")
ALGORITHMS: Final = {
    "ppo": "PPO",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "remax": "ReMax",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "raft": "RAFT",
    "control": "GRPO, shuffled rewards",
}
"""By the names of their files."""
STALE: Final = {"decoupled_ppo": "decoupled PPO", "coupled_ppo": "coupled PPO"}
"""Those on samples of older weights, likewise."""
CONVERSATIONS: Final = {"lookup": "GRPO over several turns", "lookup_control": "the same, shuffled rewards"}
"""Those on a task of several turns, likewise."""
PREFERENCES: Final = {"dpo": "DPO", "ipo": "IPO", "simpo": "SimPO", "orpo": "ORPO", "kto": "KTO"}
"""Those on preferences, likewise."""
RANKS: Final = (1, 4, 16)
"""Of adapters."""
ADAPTED: Final = {f"grpo_rank_{rank}": f"GRPO, rank {rank}" for rank in RANKS}
"""Those that train adapters in place of the weights, likewise."""
FINE_TUNED: Final = {"sft": "SFT", **{f"sft_rank_{rank}": f"SFT, rank {rank}" for rank in RANKS}}
"""Supervised fine-tuning on right answers, of the weights and of adapters, likewise."""
DISTILLED: Final = {"opd": "sampled tokens", "opd_full": "whole distributions"}
"""Those that learn from a teacher, likewise."""
CURRICULA: Final = {
    "uniform": "epochs",
    "dynamic": "epochs, dynamic sampling",
    "pools": "pools",
    "learnability": "learnability",
    "thompson": "Thompson sampling",
}
"""Those on prompts of which a third is always solved and a third never, likewise."""
CONTROLS: Final = ("control", "lookup_control")
"""What must not learn."""
STALENESS: Final = (0, 1, 2, 4, 8)
"""How many versions old these samples are."""
Row = tuple[str, int | None]
"""An algorithm, and the age of its samples."""
ROWS: Final[Mapping[Row, str]] = {
    **{(name, None): title for name, title in {**ALGORITHMS, **CONVERSATIONS, **PREFERENCES, **DISTILLED}.items()},
    **{(name, None): title for name, title in {**CURRICULA, **ADAPTED, **FINE_TUNED}.items()},
    **{(name, age): f"{title}, {age} old" for name, title in STALE.items() for age in STALENESS},
}
"""Titles of the rows of the tables."""
SEEDS: Final = (0, 1, 2)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One algorithm with one seed; its samples are `staleness` versions old."""

    algorithm: str
    seed: int
    staleness: int | None = None

    @property
    def name(self) -> str:
        age = "" if self.staleness is None else f"-s{self.staleness}"
        return f"{self.algorithm}{age}-{self.seed}"

    @property
    def config(self) -> Path:
        return CONFIGS / f"{self.algorithm}.yaml"

    @property
    def result(self) -> Path:
        return RESULTS / f"{self.name}.json"

    @property
    def overrides(self) -> list[str]:
        return [] if self.staleness is None else [f"rollout.max_staleness={self.staleness}"]

    def settings(self) -> str:
        """What stands in its file and in those that the file inherits, and its overrides, as a short hash."""
        raw, _ = merged(self.config, self.overrides)
        return hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def read(self) -> dict[str, Any] | None:
        """Its result; None where there is none of these settings."""
        if not self.result.exists():
            return None
        result = json.loads(self.result.read_text(encoding="utf-8"))
        return result if result["settings"] == self.settings() else None


CELLS: Final = tuple(Cell(algorithm=name, seed=seed, staleness=age) for seed in SEEDS for name, age in ROWS)
"""All, in the order in which they are done."""
