"""The page as one text: its parts in `page/`, and in an export the answers about its runs."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.dashboard.view.run_view import RunView
from megarl.files import JsonObject, write_durably
from megarl.run.sinks import as_json

_PARTS = Path(__file__).with_name("page")
_SCRIPTS = (
    "base.js",
    "overview.js",
    "curves.js",
    "tokens.js",
    "transcripts.js",
    "samples.js",
    "held_out.js",
    "timeline.js",
    "settings.js",
    "main.js",
)
_SAMPLES_BYTES = 16 << 20
"""Size of a run's samples in a page; of more, there are those of the last steps."""
_TIMELINE_COLUMNS = "4000"
_POINTS = 2000
"""Points of a metric."""


def export(views: Sequence[RunView], path: Path) -> None:
    """Writes the page of runs into a file; raises OSError if it cannot be written."""
    answers: JsonObject = {}
    for number, view in enumerate(views):
        for question, query, answer in _answers(view):
            answers[key(question, {**query, "run": str(number)})] = answer
    write_durably(path, page_text({"runs": len(views), "answers": answers}))


def key(question: str, query: dict[str, str]) -> str:
    """Returns the text of a question by which the page finds its answer."""
    fields = [f"{name}={value}" for name, value in sorted(query.items())]
    return f"{question}?{'&'.join(fields)}"


def _answers(view: RunView) -> Iterator[tuple[str, dict[str, str], Any]]:
    for question in ("overview", "steps", "settings", "left_out"):
        yield question, {}, view.answer(question, {})
    series = view.answer("series", {})
    thinned = {name: _thinned(points) for name, points in series["series"].items()}
    yield "series", {}, {**series, "series": thinned}
    yield "timeline", {}, view.answer("timeline", {"columns": _TIMELINE_COLUMNS})
    yield "prompts", {}, view.answer("prompts", {})
    yield from _samples(view)


def _samples(view: RunView) -> Iterator[tuple[str, dict[str, str], Any]]:
    """Yields the samples of the last steps that fit, of one prompt at least."""
    for kind, steps in view.answer("steps", {}).items():
        left = _SAMPLES_BYTES // 2
        for step, _ in reversed(steps):
            step_query = {"kind": kind, "step": str(step)}
            groups = view.answer("groups", step_query)
            fitting: list[JsonObject] = []
            for group in groups:
                query = {**step_query, "prompt": group["prompt_id"]}
                samples = view.answer("group", query)
                size = len(json.dumps(samples))
                if size > left and (fitting or step != steps[-1][0]):
                    break
                left -= size
                fitting.append(group)
                yield "group", query, samples
            if fitting:
                yield "groups", step_query, fitting
            if len(fitting) < len(groups):
                break


def _thinned(points: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Returns every n-th point, and the last one."""
    stride = math.ceil(len(points["steps"]) / _POINTS)
    if stride <= 1:
        return points
    return {name: [*column[:-1:stride], column[-1]] for name, column in points.items()}


def page_text(data: Any = None) -> str:
    """Returns the HTML, with the answers of an export; only its own script runs there."""
    script = "\n".join((_PARTS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "DIGEST": digest,
        "STYLE": (_PARTS / "style.css").read_text(encoding="utf-8"),
        "DATA": embedded(data),
        "SCRIPT": script,
    }
    pieces = re.split(r"{{(\w+)}}", (_PARTS / "page.html").read_text(encoding="utf-8"))
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    return "".join(pieces)


def embedded(data: Any) -> str:
    """Returns JSON that no HTML parser takes for markup."""
    text = json.dumps(as_json(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
