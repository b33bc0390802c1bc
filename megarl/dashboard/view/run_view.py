"""What the page asks about a run: answers that JSON can express, from the run's directory alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from megarl.dashboard.status.reading import read_status
from megarl.dashboard.status.show import duration
from megarl.dashboard.view.sample_index import SampleIndex
from megarl.dashboard.view.timeline import Timeline
from megarl.files import JsonObject, LineFollower, read_lines
from megarl.run.display import COLUMNS
from megarl.run.health import HealthMonitor, health_limits, shown_limits
from megarl.run.paths import RunPaths, read_config
from megarl.run.sinks import WRITTEN, flat

Query = Mapping[str, str]

_MAX_HITS = 200
_MAX_LEFT_OUT = 200
_COLUMNS = 1500
_MAX_COLUMNS = 20000
"""Default and maximum columns of a timeline."""


class RunView:
    """A run, followed while it trains. Its methods are called by several threads."""

    def __init__(self, path: Path, name: str) -> None:
        self._run = RunPaths(path)
        self.name = name
        self._lock = Lock()
        self._metrics = MetricTable(self._run)
        self._samples = SampleIndex(self._run)
        self._timeline = Timeline(self._run)

    def answer(self, question: str, query: Query) -> Any:
        """Returns the answer to a question.

        Raises:
            ValueError, KeyError: the question is unknown, or the query does not fit.
        """
        with self._lock:
            if question in ("prompts", "steps", "groups", "group", "search"):
                self._samples.update()
            match question:
                case "overview":
                    return self._overview()
                case "series":
                    self._metrics.update()
                    names = query["names"].split(",") if query.get("names") else None
                    points = self._metrics.after(int(query.get("after", "-1")), names)
                    return {"generation": self._metrics.generation, "series": points}
                case "prompts":
                    return self._samples.prompts()
                case "steps":
                    return {kind: self._samples.steps(kind) for kind in ("train", "evaluation")}
                case "groups":
                    return self._samples.groups(query["kind"], int(query["step"]))
                case "group":
                    return self._samples.samples(query["kind"], int(query["step"]), query["prompt"])
                case "search":
                    step = int(query["step"]) if query.get("step") else None
                    return self._samples.search(query["kind"], query["text"], _MAX_HITS, step)
                case "timeline":
                    self._timeline.update()
                    start = float(query.get("start", "0"))
                    end = float(query.get("end") or self._timeline.end)
                    columns = min(_MAX_COLUMNS, int(query.get("columns", _COLUMNS)))
                    return self._timeline.window(start, end, columns)
                case "settings":
                    return dict(flat(read_config(self._run.config)))
                case "left_out":
                    rows = read_lines(self._run.left_out)
                    return {"count": len(rows), "rows": rows[:_MAX_LEFT_OUT]}
                case _:
                    raise KeyError(question)

    def _overview(self) -> JsonObject:
        self._metrics.update()
        status = read_status(self._run.path)
        findings: list[JsonObject] = []
        for found in self._metrics.health.findings:
            harmful = found.check.harmful
            findings.append({"first": found.first, "last": found.last, "text": found.text, "harmful": harmful})
        series = self._metrics.series.values()
        return {
            **asdict(status),
            "name": self.name,
            "left": None if status.seconds_left is None else duration(status.seconds_left),
            "generation": self._metrics.generation,
            "names": sorted(self._metrics.series),
            "last_step": max((points["steps"][-1] for points in series), default=0),
            "columns": {name: asdict(column) for name, column in COLUMNS.items() if name in status.metrics},
            "limits": shown_limits(health_limits(read_config(self._run.config))),
            "findings": findings,
        }


def open_runs(paths: Sequence[Path]) -> list[RunView]:
    """Returns the views of runs, named by their directories; by their paths where several have the same name."""
    names = [path.resolve().name for path in paths]
    views: list[RunView] = []
    for path, name in zip(paths, names, strict=True):
        views.append(RunView(path, name if names.count(name) == 1 else str(path)))
    return views


class MetricTable:
    """The `steps` and `values` of a run's metrics; values that are not finite are None.

    `generation` grows when a resumed run takes steps again, so that what was read before is void.
    """

    def __init__(self, run: RunPaths) -> None:
        self.generation = 0
        self._config = run.config
        self._steps = LineFollower(run.metrics)
        self._evaluations = LineFollower(run.evaluations)
        self._clear()

    def _clear(self) -> None:
        self.series: dict[str, dict[str, list[Any]]] = {}
        self.health = HealthMonitor(limits=health_limits(read_config(self._config)))

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

    def _add(self, line: JsonObject) -> bool:
        """Adds the numbers of a line; False for a line without a step."""
        step = line.get("step")
        if not isinstance(step, int):
            return False
        for name, value in line.items():
            if name not in ("step", WRITTEN) and (value is None or isinstance(value, int | float)):
                points = self.series.setdefault(name, {"steps": [], "values": []})
                points["steps"].append(step)
                points["values"].append(None if value is None else float(f"{value:.7g}"))
        return True

    def after(self, step: int, names: Collection[str] | None = None) -> dict[str, dict[str, list[Any]]]:
        """Returns the points after a step of the named series, or of all, with seven digits."""
        found: dict[str, dict[str, list[Any]]] = {}
        for name, points in self.series.items():
            if names is None or name in names:
                first = bisect_right(points["steps"], step)
                found[name] = {key: column[first:] for key, column in points.items()}
        return found
