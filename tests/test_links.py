# SPDX-License-Identifier: Apache-2.0
"""Every link between two Markdown files leads somewhere, and every page of docs/ stands in its table of contents."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"^(`{3,}|~{3,}).*?^\1`*$", re.DOTALL | re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(?::[^\n]*\n)*(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(<?([^()\s>]+(?:\([^()\s]*\))?)>?(?: \"[^\"]*\")?\)|<(?:a|img)\b[^>]*?(?:href|src)=\"([^\"]+)\"")
HEADING = re.compile(r"^ {0,3}#{1,6} +(.+?)(?: +#+)?$|\b(?:id|name)=\"([^\"]+)\"", re.MULTILINE)


def pages():
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return sorted(str(page.relative_to(ROOT)) for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@functools.cache
def prose(page):
    return CODE.sub("", page.read_text())


@functools.cache
def anchors(page):
    """What GitHub and the site call the headings of a page."""
    found: dict[str, int] = {}
    names = set()
    for title, name in HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) if title else name
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") if title else name
        names.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return names


def lost(page):
    """The links of a page that lead nowhere."""
    found = []
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", "``", prose(page))):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", pages())
def test_links_between_pages_lead_somewhere(page):
    assert lost(ROOT / page) == []


def test_a_link_to_a_file_or_heading_that_is_not_there_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n[1](none.md) [2](#a-b-c) [3](#a-b) [4](page.md#a-b-c) `[5](no)`\n```\n[6](no.md)\n```\n"
    )
    assert lost(page) == ["none.md", "#a-b"]


def test_every_example_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    examples = [path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and any(path.glob("[!_]*"))]
    assert [name for name in sorted(examples) if f"(examples/{name}" not in readme] == []


def test_every_page_stands_in_the_table_of_contents_once():
    lists = TOCTREE.findall((ROOT / "docs/index.md").read_text())
    listed = [line for line in "".join(lists).split() if re.fullmatch(r"[\w./-]+", line)]
    there = [(ROOT / "docs" / name).resolve().relative_to(ROOT) for name in listed]
    assert len(there) == len(set(there))
    wanted = {path.relative_to(ROOT).with_suffix("") for path in (ROOT / "docs").rglob("*.md")} - {Path("docs/index")}
    wanted = {path for path in wanted if path.parts[1] != "decisions" or path.name == "index"}
    assert TOCTREE.findall((ROOT / "docs/decisions/index.md").read_text()) == [
        "\n*\n"
    ]  # it lists all that are beside it
    assert sorted(map(str, wanted - set(there))) == [], "add them to a list in docs/index.md"
