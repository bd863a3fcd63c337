# SPDX-License-Identifier: Apache-2.0
"""The reference has every public name and every error code; the pages of settings are held in tests/settings. F59"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
from tests import python_page

from forebay.errors import ForebayError
from forebay.protocols.native import code_of, status_of
from forebay.transports.grpc import statuses
from forebay.transports.http import http_errors

REFERENCE = Path(__file__).parents[1] / "docs/reference"
MODULES = ("forebay", "forebay.cluster", "forebay.openai", "forebay.runtimes", "forebay.testing")


def test_every_public_name_is_in_the_reference():
    listed = [f"forebay.{name}" for names in python_page.SECTIONS.values() for name in names.split()]
    public = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]
    assert len(listed) == len(set(listed))
    assert sorted(set(public) ^ set(listed)) == [], "tests/python_page.py lists each public name, and no other"


def test_the_page_of_names_is_as_the_code():
    written = python_page.python_page()
    assert python_page.PAGE.read_text() == written, "run: .venv/bin/python -m tests.python_page"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module):
    home = importlib.import_module(module)
    found = {name: getattr(home, name) for name in home.__all__ if name not in {"SKIP", "ToolChoice"}}
    assert [name for name, value in found.items() if not inspect.getdoc(value)] == []


def classes(kind):
    yield kind
    for below in kind.__subclasses__():
        if below.__module__.startswith("forebay."):
            yield from classes(below)


def test_every_error_code_is_in_the_reference():
    assert issubclass(http_errors.WrongHost, ForebayError)
    assert issubclass(statuses.MayNotManage, ForebayError)
    made = (kind.__new__(kind) for kind in classes(ForebayError))
    wanted = {(str(status_of(error)), code_of(error)) for error in made}
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (REFERENCE / "errors.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == wanted, "docs/reference/errors.md has a row for each status and code"


def test_the_classes_in_the_reference_have_the_statuses_they_have():
    home = importlib.import_module("forebay")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", (REFERENCE / "errors.md").read_text(), re.MULTILINE)
    assert rows
    assert [row for row in rows if str(status_of(getattr(home, row[0])("a"))) != row[1]] == []
