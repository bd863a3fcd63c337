# SPDX-License-Identifier: Apache-2.0
"""What a model class may say, and what is said of one that is wrong."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from tests.waiting import PATIENCE_S

from forebay.errors import ConfigError
from forebay.serving.models.model import Model, kebab, load_module, models_in, settings_of
from forebay.serving.models.schema import spell


def model(predict=lambda self, batch: batch, **attributes):
    return type("MyModel", (Model,), {"predict": predict, **attributes})


@pytest.mark.parametrize(
    "name, expected",
    [("Echo", "echo"), ("FileType", "file-type"), ("HTTPEcho2", "http-echo2"), ("my_model", "my-model"), ("A", "a")],
)
def test_names_become_kebab_case(name, expected):
    assert kebab(name) == expected


def test_settings_have_defaults():
    found = settings_of(model())
    assert (found.name, found.version, found.max_batch_size, found.max_wait_ms) == ("my-model", "1", 64, None)
    assert (found.streams, found.is_async, found.batchable, found.description) == (False, False, False, "")


@pytest.mark.parametrize(
    "attribute, value",
    [
        ("max_batch_size", 0),
        ("max_batch_size", True),
        ("max_batch_size", "64"),
        ("timeout_ms", 0),
        ("timeout_ms", 1.5),
        ("deadline_ms", 0.5),
        ("deadline_ms", float("nan")),
        ("deadline_ms", 1e9),
        ("max_queue", 0),
        ("max_wait_ms", -1),
        ("max_wait_ms", True),
        ("max_wait_ms", "1"),
        ("name", "a/b/c"),
        ("name", "-a"),
        ("name", "a" * 129),
        ("name", 7),
        ("name", property(lambda self: "mine")),
    ],
)
def test_a_wrong_setting_is_told_with_its_value(attribute, value):
    with pytest.raises(ConfigError, match=rf"MyModel\.{attribute}: expected .*, got ") as caught:
        settings_of(model(**{attribute: value}))
    assert repr(value) in caught.value.message


def test_odd_settings_are_taken():
    found = settings_of(model(max_batch_size=1, max_queue=1, timeout_ms=1, max_wait_ms=0))
    assert (found.max_batch_size, found.max_queue, found.timeout_ms, found.max_wait_ms) == (1, 1, 1, 0)


def test_a_model_needs_predict():
    with pytest.raises(ConfigError, match="has no method `predict`"):
        settings_of(type("Empty", (Model,), {}))


@pytest.mark.parametrize(
    "predict",
    [
        lambda self: [],
        lambda self, batch, more: [],
        lambda self, batch, *, named: [],
        staticmethod(lambda: [0]),
        classmethod(lambda cls: []),
    ],
)
def test_predict_takes_one_argument(predict):
    with pytest.raises(ConfigError, match="cannot be called with one argument"):
        settings_of(model(predict))


@pytest.mark.parametrize(
    "predict",
    [
        lambda self, batch: [],
        lambda self, batch, more=1: [],
        lambda self, *batch: [],
        staticmethod(lambda batch: []),
        classmethod(lambda cls, batch: []),
    ],
)
def test_predict_may_be_written_in_many_ways(predict):
    settings_of(model(predict))


def test_hooks_are_checked_as_well():
    with pytest.raises(ConfigError, match="preprocess"):
        settings_of(model(preprocess=lambda self: None))


def test_kinds_of_predict_are_told_apart():
    async def coroutine(self, batch):
        return batch

    def generator(self, batch):
        yield batch

    async def both(self, batch):
        yield batch

    found = [settings_of(model(predict)) for predict in (coroutine, generator, both)]
    assert [(one.is_async, one.streams) for one in found] == [(True, False), (False, True), (True, True)]


# Files


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "mine.py"

    def write(text):
        path.write_text(text, encoding="utf-8")
        return path

    return write


TWO = """
import forebay
class One(forebay.Model):
    def predict(self, batch): return batch
class Two(One): pass
Alias = forebay.Model
"""


def test_models_are_found_in_a_file(file):
    module = load_module(file(TWO))
    assert [found.__name__ for found in models_in(module)] == ["One", "Two"]
    assert [found.__name__ for found in models_in(module, "Two")] == ["Two"]
    assert load_module(file(TWO)) is module


BASES = """
import abc
import forebay
class Shared(forebay.Model):
    def load(self): self.word = self.say()
class Abstract(Shared, abc.ABC):
    @abc.abstractmethod
    def say(self): ...
    def predict(self, batch): return [self.word for _ in batch]
class One(Abstract):
    def say(self): return "one"
class Forgotten(Abstract):
    pass
"""


def test_what_the_models_of_a_file_only_have_in_common_is_none_of_them(file):
    module = load_module(file(BASES))
    assert [found.__name__ for found in models_in(module)] == ["One", "Forgotten"]
    assert settings_of(module.One).name == "one"
    for model, told in (
        (module.Forgotten, "Forgotten is abstract: `say` is not implemented"),
        (models_in(module, "Shared")[0], "Shared has no method `predict`"),
    ):
        with pytest.raises(ConfigError, match=told):
            settings_of(model)


def test_a_file_in_a_package_imports_its_neighbours_by_dots(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    inner = tmp_path / "dotted_package" / "inner"
    inner.mkdir(parents=True)
    for name, text in {
        "../__init__.py": "",
        "../outer.py": "WORD = 'outer'",
        "__init__.py": "",
        "beside.py": "WORD = 'beside'",
        "models.py": f"from .beside import WORD as A\nfrom ..outer import WORD as B\n{TWO}",
    }.items():
        (inner / name).write_text(text)
    module = load_module(inner / "models.py")
    assert (module.A, module.B) == ("beside", "outer")
    assert [found.__name__ for found in models_in(module)] == ["One", "Two"]
    assert spell(module.Two) == "`Two`"


@pytest.mark.parametrize("name", ["squares.py", "my-squares.v2.py", "packed/inner/squares.py"])
def test_another_process_finds_what_is_in_a_file_by_the_names_that_pickles_have(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = (tmp_path / name).parent
    folder.mkdir(parents=True, exist_ok=True)
    for inner in {folder, folder.parent} - {tmp_path, tmp_path.parent}:
        (inner / "__init__.py").touch()
        (inner / "roots.py").write_text("from math import isqrt")
    dots = "from ..roots import isqrt" if folder != tmp_path else "from math import isqrt"
    (tmp_path / name).write_text(f"{dots}\ndef square(number): return isqrt(number * number) * number")
    pickled = pickle.dumps(load_module(tmp_path / name).square)
    # As a process of joblib does, or of `multiprocessing` that is not forked.
    script = f"import pickle, sys; sys.path[:] = {sys.path!r}; print(pickle.loads({pickled!r})(3))"
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, timeout=PATIENCE_S)
    assert (done.stdout, done.stderr) == (b"9\n", b"")


def test_the_nearest_name_is_told(file):
    with pytest.raises(ConfigError, match="did you mean Two"):
        models_in(load_module(file(TWO)), "Tow")


def test_a_file_without_a_model_says_what_to_write(file):
    with pytest.raises(ConfigError, match=r"class MyModel\(forebay.Model\)"):
        models_in(load_module(file("x = 1")))


def test_a_missing_file_names_the_nearest(file):
    with pytest.raises(ConfigError, match=r"did you mean mine\.py"):
        load_module(file("").parent / "mime.py")


def test_a_file_that_raises_is_not_kept(file):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_module(file("1 / 0"))
