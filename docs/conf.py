"""How the pages become a site: `make docs` builds it with Sphinx, from the repository's root, into build/docs.

The source folder is the root, so that links lead where they lead on a checkout: to other pages, to the READMEs of the
examples and of contrib, to files. What leads nowhere is a warning, a page that the index does not name is one, and
warnings fail the build. It needs no network.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

project = "Intarsia"
author = "The Intarsia authors"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "CHANGELOG.md",
    "README.md",
    "contrib/README.md",
    "docs/*.md",
    "docs/results/*.md",
    "examples/README.md",
    "examples/*/README.md",
]
exclude_patterns = [".*", "build", "dist"]
nitpicky = True
# Every heading has an anchor, made of its text as the hosts of checkouts make it.
myst_heading_anchors = 6
highlight_language = "text"

html_theme = "furo"
html_title = f"Intarsia {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False


def setup(app: Sphinx) -> None:
    """Have Sphinx call what prepares each page."""
    app.connect("source-read", _read)


def _read(_: Any, name: str, source: list[str]) -> None:
    folder = (ROOT / name).parent
    source[0] = re.sub(r"\]\(([^)#:]+)\)", lambda found: f"]({_page(folder, found[1])})", source[0])
    if name == root_doc:
        source[0] += "".join(_contents(source[0]))


def _page(folder: Path, target: str) -> str:
    """Lead to the README of a folder: a site does not list files."""
    is_shown = (folder / target / "README.md").exists()
    return f"{target.rstrip('/')}/README.md" if is_shown else target


def _contents(index: str) -> list[str]:
    """Return the site's table of contents: the pages that each section of the index links to, in its order."""
    sections = re.split(r"^## ", index, flags=re.MULTILINE)[1:]
    made = []
    for section in sections:
        pages = re.findall(r"^- \[[^]]*\]\(([^)]+)\.md\)", section, flags=re.MULTILINE)
        caption = section.partition("\n")[0]
        made.append("\n".join(["\n\n```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]))
    return made
