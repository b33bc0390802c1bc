"""What engines have in progress, and how busy they are."""

from __future__ import annotations

import time

import numpy as np


class EngineLoad:
    """The work of engines, by number of the engine. An engine is busy while it has responses in progress."""

    def __init__(self, engines: int) -> None:
        self.responses = [0] * engines
        """Responses in progress."""
        self.tokens = [0] * engines
        """Tokens in flight: those of prompts, and those that may be sampled."""
        self._written = np.zeros(engines)
        self._busy_s = np.zeros(engines)
        self._changed = [time.perf_counter()] * engines
        self._read = time.perf_counter()

    def add(self, engine: int, responses: int, tokens: int) -> None:
        """Adds to an engine's responses in progress, and to its tokens in flight."""
        now = time.perf_counter()
        if self.responses[engine]:
            self._busy_s[engine] += now - self._changed[engine]
        self._changed[engine] = now
        self.responses[engine] += responses
        self.tokens[engine] += tokens

    def wrote(self, engine: int, tokens: int) -> None:
        """Counts the tokens of finished responses."""
        self._written[engine] += tokens

    def take_metrics(self) -> dict[str, float]:
        """Returns the engines' idle fraction and speed since the last reading."""
        for engine in range(len(self.responses)):
            self.add(engine, 0, 0)
        now = time.perf_counter()
        busy = self._busy_s
        written = self._written
        metrics = {"rollout/engine_idle": float(1 - busy.mean() / (now - self._read))}
        if written.any():
            speeds = written[written > 0] / busy[written > 0]
            metrics["perf/rollout_tokens_per_second"] = float(written.sum() / busy.max())
            metrics["perf/engine_tokens_per_second_min"] = float(speeds.min())
            metrics["perf/engine_tokens_per_second_max"] = float(speeds.max())
        self._busy_s = np.zeros_like(busy)
        self._written = np.zeros_like(written)
        self._read = now
        return metrics
