"""The scores of each held-out prompt after each evaluation."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from megarl.files import LineFollower
from megarl.run.paths import RunPaths
from megarl.run.view.sample_index import SampleIndex


class HeldOutPrompts:
    """Follows the scores of held-out prompts: the mean of a prompt's responses, by prompt, reward and step."""

    def __init__(self, run: RunPaths) -> None:
        self._lines = LineFollower(run.prompt_scores)
        self._scores: dict[str, dict[str, dict[int, float]]] = {}

    def update(self) -> None:
        """Reads what has been written since the last call."""
        if self._lines.was_cut():
            self._scores.clear()
        for _, line in self._lines.read():
            for reward, scores in line.get("scores", {}).items():
                known = [score for score in scores if score is not None]
                if known:
                    by_reward = self._scores.setdefault(str(line["prompt_id"]), {})
                    by_reward.setdefault(reward, {})[line["step"]] = fmean(known)

    def prompts(self, samples: SampleIndex) -> list[dict[str, Any]]:
        """Returns the prompts that have answers to read, with their scores by reward: [step, mean] pairs."""
        return [
            {
                "prompt_id": prompt,
                "title": samples.titles[prompt],
                "steps": steps,
                "scores": {name: list(of.items()) for name, of in self._scores.get(prompt, {}).items()},
            }
            for prompt, steps in samples.evaluated().items()
        ]
