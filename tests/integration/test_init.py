# SPDX-License-Identifier: Apache-2.0
"""`forebay init`: what it writes runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from forebay.cli.init import class_name
from forebay.cli.main import main
from forebay.serving.models.model import kebab

SRC = str(Path(__file__).parents[2] / "src")


@pytest.fixture
def said(capsys):
    """Runs a command in this process; what is asked of many of them would take long otherwise."""

    def run(*arguments):
        try:
            status = main([*map(str, arguments)])
        except SystemExit as ended:
            status = ended.code
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


def test_the_project_is_checked_served_and_tested_as_it_stands(cli, serve, tmp_path):
    result = cli("init", "kind-words", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "forebay serve kind-words" in result.stdout
    folder = tmp_path / "kind-words"
    assert {path.name for path in folder.iterdir()} == {"model.py", "forebay.yaml", "test_model.py", "README.md"}
    assert len((folder / "README.md").read_text().splitlines()) == 10
    assert "POST /models/kind-words" in cli("check", ".", cwd=folder).stdout
    server = serve(folder)
    answer = server.call("kind-words", {"text": "a kind word"})
    assert answer.json()["is_kind"] is True
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SRC},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "3 passed" in tested.stdout


def test_what_it_says_to_type_can_be_typed(said, tmp_path):
    _, out, _ = said("init", tmp_path / "my models" / "kind")
    assert f"forebay serve '{tmp_path}/my models/kind'\n  python -m pytest '{tmp_path}/my models/kind'" in out


def test_nothing_is_overwritten(said, tmp_path):
    (tmp_path / "mine").mkdir()
    assert said("init", tmp_path / "mine")[0] == 0
    status, _, err = said("init", tmp_path / "mine")
    assert (status, "exists already" in err) == (2, True)
    (tmp_path / "file").touch()
    assert said("init", tmp_path / "file")[0] == 2


def test_a_folder_that_cannot_be_is_told(said, tmp_path):
    status, _, err = said("init", tmp_path / ("x" * 300) / "mine")
    assert (status, "x/mine cannot be written: File name too long" in err) == (2, True)


@pytest.mark.parametrize("name", ["1st", "a b", "..", "ünlaut", "a" * 65])
def test_a_name_that_no_class_can_have_is_refused(said, tmp_path, name):
    status, _, err = said("init", tmp_path / "deep" / name)
    assert (status, "expected a project name" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "folder, name",
    [("iris", "Iris"), ("my-model", "MyModel"), ("a_b2", "AB2"), ("sample", "SampleModel"), ("none", "NoneModel")],
)
def test_the_class_is_named_after_the_folder(folder, name):
    assert class_name(folder) == name
    assert kebab(name)
