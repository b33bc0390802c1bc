"""The metrics of a run by name, and what the health checks find, up to its last line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from typing import Any

from megarl.files import LineFollower
from megarl.run.health import HealthMonitor, health_limits, watch
from megarl.run.paths import RunPaths, read_config
from megarl.run.sinks import WRITTEN


class MetricTable:
    """The metrics of a run's steps and evaluations: pairs of step and value, which is None if it is not finite.

    `generation` grows when a resumed run takes steps again, so that what was read before is void.
    """

    def __init__(self, run: RunPaths) -> None:
        self.generation = 0
        self._config = run.config
        self._steps = LineFollower(run.metrics)
        self._evaluations = LineFollower(run.evaluations)
        self._clear()

    def _clear(self) -> None:
        self.series: dict[str, list[tuple[int, float | None]]] = {}
        self.health: HealthMonitor = watch([], limits=health_limits(read_config(self._config)))

    def update(self) -> None:
        """Reads what has been written since the last call."""
        steps_cut = self._steps.was_cut()
        if self._evaluations.was_cut() or steps_cut:
            self.generation += 1
            self._steps.rewind()
            self._evaluations.rewind()
            self._clear()
        for _, line in self._steps.read():
            if self._add(line):
                self.health.add(line)
        for _, line in self._evaluations.read():
            self._add(line)

    def _add(self, line: dict[str, Any]) -> bool:
        """Adds the numbers of a line; False for a line without a step."""
        step = line.get("step")
        if not isinstance(step, int):
            return False
        for name, value in line.items():
            if name not in ("step", WRITTEN) and (value is None or isinstance(value, int | float)):
                self.series.setdefault(name, []).append((step, value))
        return True

    def after(self, step: int, names: Collection[str] | None = None) -> dict[str, dict[str, list[Any]]]:
        """Returns the points after a step of the named series, or of all, with seven digits."""
        found: dict[str, dict[str, list[Any]]] = {}
        for name, series in self.series.items():
            if names is None or name in names:
                points = series[bisect_right(series, step, key=lambda point: point[0]) :]
                values = [None if value is None else float(f"{value:.7g}") for _, value in points]
                found[name] = {"steps": [point[0] for point in points], "values": values}
        return found
