"""What engines have in progress, and how busy they are."""

from __future__ import annotations

import time


class EngineLoad:
    """The work of engines, by number of the engine. An engine is busy while it has responses in progress."""

    def __init__(self, engines: int) -> None:
        self.responses = [0] * engines
        """Responses in progress."""
        self.tokens = [0] * engines
        """Tokens in flight: those of prompts, and those that may be sampled."""
        self._written = [0] * engines
        self._busy_s = [0.0] * engines
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
        metrics = {"rollout/engine_idle": 1 - sum(busy) / len(busy) / (now - self._read)}
        speeds: list[float] = []
        for tokens, seconds in zip(written, busy, strict=True):
            if tokens:
                speeds.append(tokens / seconds)
        if speeds:
            metrics["perf/rollout_tokens_per_second"] = sum(written) / max(busy)
            metrics["perf/engine_tokens_per_second_min"] = min(speeds)
            metrics["perf/engine_tokens_per_second_max"] = max(speeds)
        self._busy_s = [0.0] * len(busy)
        self._written = [0] * len(written)
        self._read = now
        return metrics
