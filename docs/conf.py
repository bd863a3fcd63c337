# SPDX-License-Identifier: Apache-2.0
"""How Sphinx makes the site out of the Markdown files of this repository: `make docs`.

Its source is the whole repository, so a link between two files works on disk, where code is hosted and on the site.
"""

import forebay

project = "forebay"
version = release = forebay.__version__
author = "The forebay authors"
project_copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "benchmarks/**.md",
    "docs/**.md",
    "examples/**.md",
    "src/forebay/surfaces/*/README.md",
]
exclude_patterns = [".venv", ".git", "site", "dist", "build", "benchmarks/.venv*", "**/node_modules", "examples/*/out"]

# A link to a heading that is gone is an error, as one to a file is.
myst_heading_anchors = 4
# Attributes are called `type` in two classes: what a signature means by it is neither.
suppress_warnings = ["ref.python"]

# Docstrings are Google style, and one backtick means code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"forebay {version}"
html_copy_source = False
html_show_sourcelink = False
# The first page lies below docs/; this one leads there.
html_additional_pages = {"index": "first.html"}
templates_path = ["templates"]
html_theme_options = {"navigation_with_keys": True}


def indented_is_code(_app, _what, _name, _obj, _options, lines):
    """What stands indented below a colon is code in our docstrings; reStructuredText wants two colons for it."""
    for at, (line, blank, code) in enumerate(zip(lines, lines[1:], lines[2:], strict=False)):
        deeper = len(code) - len(code.lstrip()) > len(line) - len(line.lstrip())
        if line.endswith(":") and not line.endswith("::") and not blank and code and deeper:
            lines[at] = f"{line}:"


def setup(app):
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", indented_is_code, priority=100)
