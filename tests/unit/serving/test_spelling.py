# SPDX-License-Identifier: Apache-2.0
"""What a class says in other words than forebay's is found before it is served, and what is its own is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.serving.models.misspelt_names import HOOKS, STEPS
from forebay.serving.models.model import Model, settings_of


class Base(Model):
    def predict(self, batch):
        return batch


def model(base: type = Base, **attributes: Any) -> Any:
    return type("MyModel", (base,), attributes)


def test_every_method_that_is_called_is_told_of():
    told = Model.__doc__ or ""
    assert [name for name in (*HOOKS, *STEPS) if f"`{name}" not in told] == []


@pytest.mark.parametrize(
    "hook, told",
    [
        (lambda self, kind: True, r"healthy\(self, kind\) is called without arguments"),
        (lambda self: (yield True), r"healthy is a generator"),
        (property(lambda self: True), r"healthy is a property; make it a method"),
    ],
)
def test_what_says_how_a_model_is_can_be_called(hook, told):
    with pytest.raises(ConfigError, match=rf"MyModel\.{told}"):
        settings_of(model(Base, healthy=hook))


def does_nothing(self, *arguments):
    return arguments


@pytest.mark.parametrize(
    "written, meant",
    [
        ("max_batchsize", "max_batch_size"),
        ("maxBatchSize", "max_batch_size"),
        ("MAX_BATCH_SIZE", "max_batch_size"),
        ("max_bach_size", "max_batch_size"),
        ("max_wait", "max_wait_ms"),
        ("batch_size", "max_batch_size"),
        ("timeout", "timeout_ms"),
        ("timeout_s", "timeout_ms"),
        ("latency_objective", "latency_objective_ms"),
        ("isolate_error", "isolate_errors"),
        ("batcheable", "batchable"),
        ("preproces", "preprocess"),
        ("pre_process", "preprocess"),
        ("postproccess", "postprocess"),
        ("lood", "load"),
        ("unlaod", "unload"),
        ("batchkey", "batch_key"),
    ],
)
def test_a_misspelt_attribute_or_method_is_named_with_what_was_meant(written, meant):  # F53
    with pytest.raises(ConfigError, match=rf"MyModel\.{written} .*did you mean `{meant}`\?"):
        settings_of(model(Base, **{written: does_nothing}))


@pytest.mark.parametrize(
    "written, told",
    [
        ("setup", "`load`"),
        ("decode_request", "`preprocess`"),
        ("encode_response", "`postprocess`"),
        ("deserialize", "`preprocess`"),
        ("serialize", "`postprocess`"),
        ("unbatch", "`predict`"),
        ("health", "`healthy`"),
        ("check_health", "`healthy`"),
        ("__is_ready__", "`healthy`"),
        ("reconfigure", "`load`"),
    ],
)
def test_the_methods_of_other_servers_are_known_by_name(written, told):  # F53
    with pytest.raises(ConfigError, match=rf"MyModel\.{written} is never called.*{told}"):
        settings_of(model(Base, **{written: does_nothing}))


@pytest.mark.parametrize("written", ["predicct", "forward", "inference", "infer", "__call__"])
def test_a_class_without_predict_is_told_which_method_looks_like_it(written):  # F53
    with pytest.raises(ConfigError, match=rf"MyModel has no method `predict`.*`{written}`"):
        settings_of(model(Model, **{written: does_nothing}))


@pytest.mark.parametrize(
    "name",
    [
        "names",
        "versions",
        "loads",
        "labels",
        "tokenizer",
        "max_length",
        "batch",
        "threshold",
        "_setup",
        "_max_batchsize",
    ],
)
def test_other_names_are_the_authors_own(name):  # F53
    assert settings_of(model(Base, **{name: does_nothing})).name == "my-model"


def test_a_name_that_the_class_uses_itself_is_no_mistake():  # F53
    class Uses(Base):
        max_wait = 3

        def load(self):
            self.setup(self.max_wait)

        def setup(self, wait):
            self.wait = [self.pre_process(number) for number in range(wait)]

        def pre_process(self, number):
            return number

    assert settings_of(Uses).max_wait_ms is None


def test_a_name_used_in_a_nested_function_is_used():  # F53
    class Uses(Base):
        max_wait = 3

        def predict(self, batch):
            def waits():
                return [self.max_wait for _ in batch]

            return waits()

    assert settings_of(Uses).max_wait_ms is None


def test_what_a_mixin_brings_is_not_looked_at():  # F53
    class Mixin:
        def setup(self):
            """Belong to somebody else."""

    assert settings_of(type("MyModel", (Base, Mixin), {})).name == "my-model"


@pytest.mark.parametrize(
    "init",
    [lambda self, path: None, lambda self, *, path: None, lambda self, a, b=1: None],
)
def test_a_constructor_with_arguments_is_refused_before_it_is_called(init):  # F53
    with pytest.raises(ConfigError, match=r"MyModel\.__init__\(self.*is called without arguments.*`load`"):
        settings_of(model(__init__=init))


def test_a_load_that_wants_the_device_is_told_where_it_is():
    with pytest.raises(ConfigError, match=r"MyModel\.load\(self, device\) is called without .*`self\.device`"):
        settings_of(model(Base, load=lambda self, device: None))


@pytest.mark.parametrize("init", [lambda self: None, lambda self, path="x": None, lambda self, *rest, **named: None])
def test_a_constructor_that_needs_none_is_fine(init):  # F53
    assert settings_of(model(__init__=init)).name == "my-model"
