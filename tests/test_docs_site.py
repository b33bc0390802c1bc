"""The site of the documents: every page is in it, links and anchors lead somewhere, nothing comes from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.config.debug import REPOSITORY
from tests.needs import lacking

MKDOCS = REPOSITORY / ".venv-docs" / "bin" / "mkdocs"
MERMAID = REPOSITORY / "tests" / "mermaid" / "node_modules"
PAGES = {page.name for page in (REPOSITORY / "docs").glob("*.md")}


def test_the_index_links_to_every_page() -> None:
    index = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == PAGES - {"index.md"}


@pytest.mark.process
def test_the_site_has_no_broken_links_and_needs_no_network(tmp_path: Path) -> None:
    if not (MKDOCS.exists() and MERMAID.exists()):
        lacking("make docs-site installs MkDocs and Mermaid")
    command = [MKDOCS, "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    pages = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.glob("*.html")}
    assert pages.keys() >= {Path(page).with_suffix(".html").name for page in PAGES} | {"overview.html"}
    for name, html in pages.items():
        loaded = re.findall(r"<(?:script|img)[^>]* src=\"?([^\s\">]+)|<link[^>]* href=\"?([^\s\">]+)", html)
        files = [source or target for source, target in loaded if (source or target) not in ("", "/.")]
        outside = [file for file in files if name != "404.html" and not (tmp_path / file.split("#")[0]).exists()]
        assert not outside, name
    assert "assets/mermaid.min.js" in pages["architecture.html"]
    found = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert any(entry["location"].startswith("async.html") and "max_staleness" in entry["text"] for entry in found)
