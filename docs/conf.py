"""Sphinx configuration: the pages in this folder, the benchmark report, and API pages from docstrings."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tcpstore_async.base.version import VERSION  # noqa: E402

project = "tcpstore_async"
author = "the tcpstore_async authors"
copyright = f"2026, {author}"
version = release = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # an included page starts at a lower heading level

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autoclass_content = "both"
autodoc_default_options = {"members": True, "inherited-members": True}

html_theme = "furo"
html_title = f"tcpstore_async {VERSION}"

SOURCES = "https://github.com/tcpstore-async/tcpstore_async/blob/main/"


def _link_to_sources(app: Sphinx, name: str, text: list[str]) -> None:
    """Turn links that leave this folder into links to the repository."""
    base = (ROOT / "bench/results") if name == "report" else Path(app.srcdir)

    def link(found: re.Match[str]) -> str:
        path, hash_, anchor = found[1].partition("#")
        target = (base / path).resolve()
        if target == ROOT / "bench/results/report.md":
            return f"](report.md{hash_}{anchor})"
        if target.parent == Path(app.srcdir) or not target.is_relative_to(ROOT):
            return found[0]
        return f"]({SOURCES}{target.relative_to(ROOT)}{hash_}{anchor})"

    text[0] = re.sub(r"\]\((\.\./[^)\s]+)\)", link, text[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _link_to_sources)
