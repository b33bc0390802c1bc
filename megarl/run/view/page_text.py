"""The page as one text: its parts in `page/`, and in an export the answers about its runs."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any, Final

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
