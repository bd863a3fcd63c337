# SPDX-License-Identifier: Apache-2.0
"""Compilers by name and by object, and `forebay.jit`."""

import builtins
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.later import jax

from forebay import Batch, ConfigError, jit
from forebay.arrays.compilers import find_compiler


@dataclass
class Scores:
    values: Any
    best: Any


@pytest.mark.parametrize("compiler", ["python", "jax"])
def test_a_function_of_arrays_becomes_one_of_a_batch(compiler):  # S18
    run = jit(lambda pair: (pair[0] * 2, pair[1] / 2), compiler=compiler)
    doubled, halved = run(Batch.stack([(1, 2.0), (3, 4.0)]).pad(1))
    assert (doubled.tolist(), halved.tolist()) == ([2, 6, 0], [1.0, 2.0, 0.0])
    assert isinstance(doubled, jax.Array if compiler == "jax" else np.ndarray)


def test_only_batches_are_taken():
    run = jit(np.negative)
    assert run.__name__ == "jit(negative)"
    with pytest.raises(TypeError, match="takes a Batch, got 3"):
        run(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="a function of one argument, got 3"):
        jit(3)  # pyright: ignore[reportArgumentType]


def test_jax_takes_every_container():
    run = jit(lambda tree: Scores(tree.values * 2, {"top": tree.best[0].max(axis=1), "none": None}), compiler="jax")
    scores = run(Batch.stack([Scores(np.float32(1), [np.arange(3)])]))
    assert (scores.values.tolist(), scores.best["top"].tolist(), scores.best["none"]) == ([2], [2], None)


def test_jax_compiles_once_for_each_shape():
    traces = []
    run = jit(lambda x: traces.append(x.shape) or x + 1, compiler="jax")
    for size in (2, 2, 3, 2):
        assert run(Batch.stack([np.ones(4)] * size)).shape == (size, 4)
    assert traces == [(2, 4), (3, 4)]


def test_exceptions_of_the_function_pass():
    def fail(x):
        raise KeyError(x.shape)

    for compiler in ("python", "jax"):
        with pytest.raises(KeyError):
            jit(fail, compiler=compiler)(Batch.stack([1]))


def test_a_compiler_may_be_an_object():  # S53
    class Twice:
        def compile(self, fn, options):
            return lambda x: fn(fn(x)) + options["offset"]

        def partitions(self, options):
            return [dict(options)]

    assert jit(lambda x: x * 2, compiler=Twice(), offset=1)(Batch.stack([1, 2])).tolist() == [5, 9]


def test_unknown_compilers_are_named_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"no compiler 'pyton' \(expected one of 'python', 'jax', 'torch'\); did you mean 'python'\?"
    ):
        find_compiler("pyton")
    with pytest.raises(ConfigError, match=r"or an object with a method compile\(fn, options\), got 3"):
        find_compiler(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_a_missing_package_names_its_extra(name, monkeypatch):
    def missing(wanted, *args, **kwargs):
        if wanted.split(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(wanted, *args, **kwargs)

    real = builtins.__import__
    monkeypatch.delitem(sys.modules, f"forebay.arrays.compile_{name}", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=rf"needs {name}, which is not installed: pip install forebay\[{name}\]"):
        find_compiler(name)


@pytest.mark.parametrize(
    "compiler, option, near", [("python", "max_concurency", "max_concurrency"), ("jax", "keep_unusd", "keep_unused")]
)
def test_unknown_options_are_named_with_the_nearest(compiler, option, near):
    with pytest.raises(ConfigError, match=f"{compiler!r} has no option {option!r} .*; did you mean {near!r}"):
        jit(np.negative, compiler=compiler, **{option: 1})


def test_partitions_of_python():  # S53
    compiler = find_compiler("python")
    assert compiler.partitions({}) == [{"device": "cpu"}]
    assert compiler.partitions({"max_concurrency": 2, "x": 1}) == [{"device": "cpu", "max_concurrency": 2, "x": 1}] * 2
    for wrong in (0, True, 1.5, 10**9):  # F134
        with pytest.raises(ConfigError, match=f"a whole number of batches from 1 to 1024, got {wrong!r}"):
            compiler.partitions({"max_concurrency": wrong})


def test_devices_of_jax_by_name():  # S53
    assert jit(lambda x: x + 1, compiler="jax", device="cpu:0")(Batch.stack([1])).device == jax.devices("cpu")[0]
    with pytest.raises(ConfigError, match=r"unknown device 'cpu:99'; cpu has "):
        jit(np.negative, compiler="jax", device="cpu:99")
    assert jit(lambda x: x + 1, compiler="jax", platform="cpu")(Batch.stack([1])).committed
    with pytest.raises(ConfigError, match="jax has no platform 'abacus' here"):
        jit(np.negative, compiler="jax", platform="abacus")
    with pytest.raises(ConfigError, match="jax has no platform 'abacus' here"):
        find_compiler("jax").partitions({"platform": "abacus"})
