# SPDX-License-Identifier: Apache-2.0
"""`forebay init NAME`: a small project that runs, to be changed into one's own."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
import sys
from pathlib import Path
from typing import Any, Final

from forebay.errors import ConfigError
from forebay.serving.models.model import kebab

DESCRIPTION = """\
Write a project into a new folder: a model, a configuration, a test and a README. All of it runs as it stands:

  forebay serve NAME           serves it
  python -m pytest NAME        tests it, without a server
"""

MODEL: Final = '''\
"""A model: replace what `load` and `predict` do by your own."""

import forebay
import msgspec


class Sample(msgspec.Struct):
    """What a client sends."""

    text: str


class Result(msgspec.Struct):
    """What it gets back."""

    is_kind: bool
    score: float


class {name}(forebay.Model):
    """Tells whether a text is kind."""

    max_batch_size = 32

    def load(self):  # once in each worker, before any request: read your weights here
        self.kind = {{"good", "kind", "fine", "thanks", "please"}}

    def predict(self, batch: list[Sample]) -> list[Result]:  # one result for each sample, in order
        scores = [self.score(sample.text.lower().split()) for sample in batch]
        return [Result(is_kind=score > 0, score=score) for score in scores]

    def score(self, words: list[str]) -> float:
        return sum(word.strip(".,!?") in self.kind for word in words) / max(len(words), 1)
'''

CONFIG: Final = """\
# forebay serve {folder}; what the command line says wins, see forebay serve --help
models:
  - target: model.py
    workers: 1
    # threads: 4
    # max_batch_size: 64
    # timeout_ms: 10000
http:
  port: 8080
"""

TEST: Final = '''\
"""Calls the model as a client does, without a server: python -m pytest"""

import pytest
from forebay.testing import check_model, client
from model import {name}


@pytest.fixture(scope="module")
def model():
    with client({name}) as model:
        yield model


def test_a_kind_text_is_told_from_others(model):
    assert model.call({{"text": "Thanks, that was kind."}}) == {{"is_kind": True, "score": 0.5}}
    assert model.call({{"text": "No."}})["is_kind"] is False


def test_a_wrong_request_is_refused_with_the_field(model):
    answer = model.ask({{"text": 3}})
    assert (answer.status, answer.error["detail"]["path"]) == (422, "$.text")


def test_nobody_changes_the_results_of_others():
    check_model({name}, [{{"text": "good"}}, {{"text": "bad"}}, {{"text": ""}}], bad=[{{}}])
'''

README: Final = """\
# {folder}

    pip install forebay pytest
    forebay check .              # prints the models, or the error
    forebay serve .              # serves it on http://127.0.0.1:8080
    forebay call http://127.0.0.1:8080/models/{endpoint} '{{"text": "a kind word"}}'
    python -m pytest             # tests it, without a server

`model.py` is the model, `forebay.yaml` its settings.
A server has its API at `/docs`, its numbers at `/metrics`.
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("init", help="write a small project that runs", description=DESCRIPTION)
    parser.add_argument("name", metavar="NAME", help="a folder that is not there yet; the model is named after it")
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Write the files."""
    folder = Path(parsed.name)
    name = class_name(folder.absolute().name)
    words = {"name": name, "folder": folder.absolute().name, "endpoint": kebab(name)}
    files = {"model.py": MODEL, "forebay.yaml": CONFIG, "test_model.py": TEST, "README.md": README}
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists already, and forebay overwrites nothing in it; choose another NAME")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text.format(**words), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    typed = shlex.quote(str(folder))
    sys.stdout.write(f"{folder}: {', '.join(files)}\n\n  forebay serve {typed}\n  python -m pytest {typed}\n")
    return 0


def class_name(folder: str) -> str:
    """Return the name of the class for a folder's name; raises a `ConfigError` if there is none."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", folder):
        msg = f"expected a project name of letters, digits, '-' and '_', starting with a letter, got {folder!r}"
        raise ConfigError(msg)
    name = "".join(word[:1].upper() + word[1:] for word in re.split(r"[-_]+", folder))
    return f"{name}Model" if name in {"Sample", "Result"} or keyword.iskeyword(name) else name
