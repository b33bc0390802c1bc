"""What the page asks about a run: answers that JSON can express, from the run's directory alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from megarl.config.inheritance import RECIPES, merged, recipes
from megarl.config.schema import stage_class
from megarl.dashboard.status.format import duration
from megarl.dashboard.status.reading import read_status
from megarl.dashboard.view.metric_table import MetricTable
from megarl.dashboard.view.sample_index import HeldOutPrompts, SampleIndex
from megarl.dashboard.view.timeline import Timeline
from megarl.files import read_lines
from megarl.run.display import COLUMNS
from megarl.run.health import health_limits, shown_limits
from megarl.run.paths import RunPaths, read_config
from megarl.run.sinks import flat

Query = Mapping[str, str]

_MOST_HITS = 200
_MOST_LEFT_OUT = 200
_COLUMNS = 1500
_MOST_COLUMNS = 20000
"""Of a timeline: by default, and at most."""
_REQUIRED: Final = object()


class RunView:
    """A run, followed while it trains. Its methods are called by several threads.

    Args:
        name: of the run on the page.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._run = RunPaths(path)
        self.name = name
        self._lock = Lock()
        self._metrics = MetricTable(self._run)
        self._samples = SampleIndex(self._run)
        self._held_out = HeldOutPrompts(self._run)
        self._timeline = Timeline(self._run)

    def answer(self, question: str, query: Query) -> Any:
        """Returns the answer to one of QUESTIONS.

        Raises:
            ValueError, KeyError: it is none of them, or the query does not fit.
        """
        with self._lock:
            return QUESTIONS[question](self, query)

    def _overview(self, query: Query) -> Any:
        self._metrics.update()
        status = read_status(self._run.path)
        left = None if status.seconds_left is None else duration(status.seconds_left)
        return {
            **asdict(status),
            "name": self.name,
            "left": left,
            "generation": self._metrics.generation,
            "names": sorted(self._metrics.series),
            "last_step": max((series.steps[-1] for series in self._metrics.series.values()), default=0),
            "columns": {name: asdict(column) for name, column in COLUMNS.items() if name in status.metrics},
            "limits": shown_limits(health_limits(read_config(self._run.config))),
            "findings": [
                {"first": found.first, "last": found.last, "text": found.text, "harmful": found.check.harmful}
                for found in self._metrics.health.findings
            ],
        }

    def _series(self, query: Query) -> Any:
        self._metrics.update()
        names = query["names"].split(",") if query.get("names") else None
        points = self._metrics.after(int(query.get("after", "-1")), names)
        return {"generation": self._metrics.generation, "series": points}

    def _steps(self, query: Query) -> Any:
        self._samples.update()
        return {kind: self._samples.steps(kind) for kind in ("train", "evaluation")}

    def _groups(self, query: Query) -> Any:
        self._samples.update()
        return self._samples.groups(query["kind"], int(query["step"]))

    def _group(self, query: Query) -> Any:
        self._samples.update()
        return self._samples.samples(query["kind"], int(query["step"]), query["prompt"])

    def _search(self, query: Query) -> Any:
        self._samples.update()
        step = int(query["step"]) if query.get("step") else None
        return self._samples.search(query["kind"], query["text"], _MOST_HITS, step)

    def _prompts(self, query: Query) -> Any:
        self._samples.update()
        self._held_out.update()
        return self._held_out.prompts(self._samples)

    def _window(self, query: Query) -> Any:
        self._timeline.update()
        start = float(query.get("start", "0"))
        end = float(query.get("end") or self._timeline.end)
        columns = min(_MOST_COLUMNS, int(query.get("columns", _COLUMNS)))
        return self._timeline.window(start, end, columns)

    def _settings(self, query: Query) -> Any:
        return read_settings(self._run)

    def _recipes(self, query: Query) -> Any:
        return read_recipes()

    def _left_out(self, query: Query) -> Any:
        rows = read_lines(self._run.left_out)
        return {"count": len(rows), "rows": rows[:_MOST_LEFT_OUT]}


QUESTIONS: Final[Mapping[str, Callable[[RunView, Query], Any]]] = {
    "overview": RunView._overview,
    "series": RunView._series,
    "steps": RunView._steps,
    "groups": RunView._groups,
    "group": RunView._group,
    "search": RunView._search,
    "prompts": RunView._prompts,
    "timeline": RunView._window,
    "settings": RunView._settings,
    "recipes": RunView._recipes,
    "left_out": RunView._left_out,
}


def open_runs(paths: Sequence[Path]) -> list[RunView]:
    """Returns the views of runs, each named by as much of its path as tells it from the others."""
    names = [path.resolve().name for path in paths]
    return [
        RunView(path, name if names.count(name) == 1 else str(path)) for path, name in zip(paths, names, strict=True)
    ]


def read_settings(run: RunPaths) -> dict[str, Any]:
    """Returns the settings of a run by path, and the defaults of those that are others: null if there is none.

    `own` is null for a configuration that this version does not accept. Its files need not be on this machine.
    """
    fields = read_config(run.config)
    settings = dict(flat(fields)) if fields else {}
    try:
        own = dict(_own(stage_class(fields["stage"]).model_validate(fields), None)) if fields else {}
    except (KeyError, ValidationError):
        own = None
    return {"settings": settings, "own": own}


def _own(section: BaseModel, base: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields that differ from their defaults, with these; `base` has the section's, if it is of its kind."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        field = f"{path}{info.alias or name}"
        if type(base) is type(section):
            default = getattr(base, name)
        else:
            default = _REQUIRED if info.is_required() else info.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            if "name" in type(value).model_fields and getattr(default, "name", None) != getattr(value, "name", None):
                yield f"{field}.name", getattr(default, "name", None)
            yield from _own(value, default, f"{field}.")
        elif isinstance(value, Mapping) and any(isinstance(entry, BaseModel) for entry in value.values()):
            for key, entry in value.items():
                yield from _own(entry, None, f"{field}.{key}.")
        elif default is _REQUIRED or value != default:
            shown = None if default is _REQUIRED or isinstance(default, BaseModel) else default
            yield field, shown if isinstance(shown, int | float | str | bool) else shown and str(shown)


def read_recipes() -> dict[str, dict[str, Any]]:
    """Returns what each recipe sets, by path; a choice that is only named has the path of its name."""
    return {name: dict(flat(merged(RECIPES / f"{name}.yaml", ())[0])) for name in recipes()}
