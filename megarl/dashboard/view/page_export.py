"""The page as one text: its parts in `page/`, and in an export the answers about its runs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from megarl.dashboard.view.run_view import RunView
from megarl.files import write_durably
from megarl.run.sinks import as_json

_PARTS: Final = Path(__file__).with_name("page")
_SCRIPTS: Final = (
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
_SAMPLES_BYTES: Final = 16 << 20
"""Of a run's samples in a page; of more, there are some steps."""
_TIMELINE_COLUMNS: Final = "4000"
_POINTS: Final = 2000
"""Of a metric."""


def export(views: Sequence[RunView], path: Path) -> None:
    """Writes the page of runs into a file; raises OSError if it cannot be written."""
    answers: dict[str, Any] = {}
    for number, view in enumerate(views):
        for question, query, answer in _answers(view):
            answers[key(question, {**query, "run": str(number)})] = answer
    write_durably(path, page_text({"runs": len(views), "answers": answers}))


def key(question: str, query: dict[str, str]) -> str:
    """Returns the text of a question by which the page finds its answer."""
    return f"{question}?{'&'.join(f'{name}={value}' for name, value in sorted(query.items()))}"


def _answers(view: RunView) -> Iterator[tuple[str, dict[str, str], Any]]:
    for question in ("overview", "steps", "settings", "left_out", "recipes"):
        yield question, {}, view.answer(question, {})
    series = view.answer("series", {})
    yield "series", {}, {**series, "series": {name: _thinned(points) for name, points in series["series"].items()}}
    timeline = view.answer("timeline", {"columns": _TIMELINE_COLUMNS})
    yield "timeline", {}, timeline
    prompts = view.answer("prompts", {})
    yield "prompts", {}, prompts
    yield from _samples(view)


def _samples(view: RunView) -> Iterator[tuple[str, dict[str, str], Any]]:
    """Yields the samples of all steps, or of the last one, or its first prompts, and of others that fit."""
    for kind, steps in view.answer("steps", {}).items():
        left = _SAMPLES_BYTES // 2
        least = 1
        for step, _ in _outer_first(steps):
            of_step = {"kind": kind, "step": str(step)}
            groups = view.answer("groups", of_step)
            found, after = _fitting(view, [{**of_step, "prompt": group["prompt_id"]} for group in groups], left, least)
            if len(found) < len(groups) and not least:
                continue
            left = after
            least = 0
            yield "groups", of_step, groups[: len(found)]
            yield from found


def _fitting(
    view: RunView, queries: Sequence[dict[str, str]], left: int, least: int
) -> tuple[list[tuple[str, dict[str, str], Any]], int]:
    """Returns the answers about the first prompts, at least so many, that fit into the bytes left, and what is left."""
    found: list[tuple[str, dict[str, str], Any]] = []
    for query in queries:
        answer = view.answer("group", query)
        size = len(json.dumps(answer))
        if size > left and len(found) >= least:
            break
        found.append(("group", query, answer))
        left -= size
    return found, left


def _outer_first(steps: Sequence[Any]) -> list[Any]:
    """Returns the last and the first step, then those that halve what is between."""
    order = [*steps[-1:], *steps[:-1][:1]]
    parts = [steps[1:-1]]
    while parts := [part for part in parts if part]:
        order += [part[len(part) // 2] for part in parts]
        parts = [half for part in parts for half in (part[: len(part) // 2], part[len(part) // 2 + 1 :])]
    return order


def _thinned(points: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Returns every so many points, and the last one."""
    stride = -(-len(points["steps"]) // _POINTS)
    return points if stride <= 1 else {name: [*of[:-1:stride], of[-1]] for name, of in points.items()}


def page_text(data: Any = None) -> str:
    """Returns the HTML; nothing but its own script runs there, whatever the data say.

    Args:
        data: of an export; None for the page that asks a server.
    """
    script = "\n".join((_PARTS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (_PARTS / "page.html").read_text(encoding="utf-8")
    parts = {
        "DIGEST": digest,
        "STYLE": (_PARTS / "style.css").read_text(encoding="utf-8"),
        "DATA": embedded(data),
        "SCRIPT": script,
    }
    before, *rest = page.split("{{")
    return before + "".join(parts[name] + after for name, _, after in (part.partition("}}") for part in rest))


def embedded(data: Any) -> str:
    """Returns JSON that no HTML parser takes for markup."""
    text = json.dumps(as_json(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
