# SPDX-License-Identifier: Apache-2.0
"""How Sphinx makes the site out of the Markdown files of this repository: `make docs`.

Its source is the whole repository, so a link between two files works on disk, where code is hosted and on the site.
"""

import forebay

project = "forebay"
version = release = forebay.__version__
author = "The forebay authors"
project_copyright = author

extensions = ["myst_parser"]
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
html_theme = "furo"
html_title = f"forebay {version}"
html_copy_source = False
html_show_sourcelink = False
# The first page lies below docs/; this one leads there.
html_additional_pages = {"index": "first.html"}
templates_path = ["templates"]
html_theme_options = {"navigation_with_keys": True}
