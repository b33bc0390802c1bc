"""What `make docs-site` adds to MkDocs: pages and files from outside of docs/, and Mermaid without a network."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md"}
"""Files outside of docs/ that are pages of the site."""
MERMAID = ROOT / "tests" / "mermaid" / "node_modules" / "mermaid" / "dist" / "mermaid.min.js"
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> None:
    for source, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page with links that work on the site; those to files that do not exist stay, and fail the build."""
    base = ROOT if page.file.src_uri in PAGES.values() else DOCS

    def on_the_site(link: re.Match[str]) -> str:
        text, target, anchor = link.groups(default="")
        path = Path(os.path.normpath(base / target))
        if not path.exists():
            return link[0]
        if path.is_relative_to(DOCS):
            return f"[{text}]({path.relative_to(DOCS)}{anchor})"
        place = str(path.relative_to(ROOT))
        if place in PAGES:
            return f"[{text}]({PAGES[place]}{anchor})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{place}{anchor})"
        if path.name in text:
            return f"`{place}`"
        return f"{text} (`{place}`)"

    return _LINK.sub(on_the_site, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Loads Mermaid where there are diagrams; the theme would take it from a public server."""
    if 'class="mermaid"' in html:
        return f'{html}\n<script src="assets/mermaid.min.js"></script>'
    return html


def on_post_build(config: MkDocsConfig) -> None:
    shutil.copy(MERMAID, Path(config.site_dir) / "assets")
