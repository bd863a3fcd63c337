# SPDX-License-Identifier: Apache-2.0
"""Further methods of a model: how they are declared, and what is said of a wrong one."""

import pytest

import forebay
from forebay import ConfigError, Model
from forebay.serving.models.annotations import io_types
from forebay.serving.models.further_methods import ModelMethod, check_paths, methods_of
from forebay.serving.models.model import settings_of


def model(path="/embed", **more):
    class Words(Model):
        def predict(self, batch):
            return batch

        @forebay.endpoint(path, **more)
        def embed(self, batch):
            return batch

    Words.__qualname__ = "Words"
    return Words


@pytest.mark.parametrize(
    "path, said",
    [
        ("embed", "Words.embed: the path 'embed' has no '/' at its beginning; write '/embed'"),
        ("/embed/", "Words.embed: the path '/embed/' has a '/' at its end; write '/embed'"),
        ("/my words", "Words.embed: the path '/my words' is not a path that a model can have; write '/my-words'"),
        ("/a/../b", "Words.embed: the path '/a/../b' is not a path that a model can have; write '/a/b'"),
        ("/{x}", "Words.embed: the path '/{x}' is not a path that a model can have; write '/x'"),
        ("", "Words.embed: the path '' has no '/' at its beginning; write '/embed'"),
        ("/", "Words.embed: the path '/' has a '/' at its end; write '/embed'"),
        ("/versions", "Words.embed: the path '/versions' is one of the server's own; write '/my-versions'"),
        ("/metrics/x", "Words.embed: the path '/metrics/x' is one of the server's own; write '/my-metrics/x'"),
        (3, "Words.embed: the path is 3; write '/embed'"),
    ],
)
def test_a_wrong_path_is_told_with_the_nearest_right_one(path, said):
    with pytest.raises(ConfigError) as caught:
        settings_of(model(path))
    assert caught.value.message.endswith(said)


@pytest.mark.parametrize(
    "methods, said",
    [
        (["PSOT"], "got ['PSOT']; write `methods=[\"POST\"]`"),
        (["get"], "got ['get']; write `methods=[\"GET\"]`"),
        ("GET", "got 'GET'; write `methods=[\"GET\"]`"),
        ([], 'got []; write `methods=["POST"]`'),
        (3, 'got 3; write `methods=["POST"]`'),
    ],
)
def test_an_unknown_method_of_http_is_told(methods, said):
    with pytest.raises(ConfigError) as caught:
        settings_of(model(methods=methods))
    assert caught.value.message.endswith(f"Words.embed: expected the HTTP methods 'GET' or 'POST', {said}")


def test_two_methods_with_one_path_are_told():
    class Words(model()):
        @forebay.endpoint("/embed")
        def other_one(self, batch):
            return batch

    with pytest.raises(ConfigError, match=r"embed and other_one both have the path '/embed'; write .*'/other-one'"):
        settings_of(Words)


def test_other_wrong_uses():
    with pytest.raises(ConfigError, match=r"write `@forebay.endpoint\('/embed'\)` above `embed`"):

        @forebay.endpoint  # pyright: ignore[reportArgumentType]
        def embed(self, batch): ...

    class Twice(Model):
        @forebay.endpoint("/predict")
        def predict(self, batch):
            return batch

    with pytest.raises(ConfigError, match="predict answers at the path of the model itself; leave out"):
        settings_of(Twice)
    with pytest.raises(ConfigError, match="the query of a GET has one sample"):
        settings_of(model(methods=["GET"], batchable=True))

    class Single(Model):
        def predict(self, batch):
            return batch

        @forebay.endpoint("/one")
        def one(self, text: str) -> str:
            return text

    with pytest.raises(ConfigError, match=r"annotated `str`, but one gets a list of samples; write `list\[str\]`"):
        io_types(Single, settings_of(Single).methods[0])

    class Many(Model):
        def predict(self, batch):
            return batch

        @forebay.endpoint("/many")
        def many(self, one, other):
            return one

    with pytest.raises(ConfigError, match="cannot be called with one argument"):
        settings_of(Many)


def test_what_overrides_a_method_answers_in_its_place():
    class Base(model()):
        batchable = True

        def embed(self, batch: list[int]) -> list[int]:
            """Counts."""
            return batch

        @forebay.endpoint("/setup")
        def setup(self, batch):  # a name that would be taken for another server's hook
            return batch

    first, second = methods_of(Base)
    assert (first.path, first.description, first.batchable) == ("/embed", "Counts.", True)
    assert (second.path, settings_of(Base).methods) == ("/setup", (first, second))

    class Without(Base):
        embed = None  # pyright: ignore[reportAssignmentType]

    assert [one.name for one in methods_of(Without)] == ["setup"]


@pytest.mark.parametrize(
    "wrong",
    [
        [ModelMethod(name="a", path="/versions/2")],
        [ModelMethod(name="a", path="x")],
        [ModelMethod(name="a", path="/x"), ModelMethod(name="b", path="/x")],
        [ModelMethod(name="a", path="/x"), ModelMethod(name="a", path="/y")],
        [ModelMethod(name="a", path="/x", batchable=True, streams=True)],
    ],
)
def test_what_another_process_says_is_checked(wrong):
    with pytest.raises(ConfigError):
        check_paths(wrong)
