"""Settings of Sphinx: `make site` builds the documentation into build/site."""

import re
import sys
from pathlib import Path
from typing import Any, Final

from nearkin import __version__

DOCS: Final = Path(__file__).parent
sys.path.insert(0, str(DOCS))
import architecture  # noqa: E402  (beside this file)

ROOT: Final = DOCS.parent
PACKAGES: Final = (
    "The packages of nearkin, from the command line to plain types; "
    "arrows point from a package to those that it imports"
)
EXAMPLE: Final = ROOT / "build" / "example"  # A report that `make site` has made
SHOWN: Final = {
    "architecture": ("<!-- image -->", f"![{PACKAGES}](architecture.png)"),
    "index": ("<!-- example -->", '<a href="example-report.html">An example report</a>'),
}
"""What stands in place of a comment of a page, by the page."""
REPOSITORY: Final = "https://github.com/nearkin/nearkin/blob/main"
LINK: Final = re.compile(r"\[([^\]]*)\]\((?!https?://)([^)#\s]+)(?:#[^)]*)?\)")

project = "nearkin"
author = "The nearkin developers"
release = version = __version__
html_title = f"nearkin {version}"
html_theme = "furo"
html_extra_path = [str(EXAMPLE)] if EXAMPLE.exists() else []
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["*.py"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebooks hold their outputs; tests run them
myst_enable_extensions = ["colon_fence"]
highlight_language = "text"  # indented blocks are commands, tables and equations
default_role = "code"  # docstrings write names in single backquotes
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"


def link_outside(app: Any, document: str, source: list[str]) -> None:
    """Let links that leave this folder lead to the repository: the site has no other files."""
    page = Path(app.env.doc2path(document))

    def linked(link: re.Match[str]) -> str:
        target = (page.parent / link[2]).resolve()
        if target.is_relative_to(DOCS) and target.is_file():
            return link[0]
        return f"[{link[1]}]({REPOSITORY}/{target.relative_to(ROOT)})"

    source[0] = LINK.sub(linked, source[0])


def draw_packages(app: Any) -> None:
    """Draw the image of architecture.md, which no commit holds."""
    architecture.draw(Path(app.srcdir) / "architecture.png")


def show(_: Any, document: str, source: list[str]) -> None:
    """Put what only the site has where a page wants it."""
    if document in SHOWN:
        source[0] = source[0].replace(*SHOWN[document])


def setup(app: Any) -> None:
    """Register what this file adds to Sphinx."""
    app.connect("builder-inited", draw_packages)
    app.connect("source-read", link_outside)
    app.connect("source-read", show)
