# SPDX-License-Identifier: Apache-2.0
"""A Serving as a value, and `run` in the caller."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import PATIENCE_S

from forebay import Batch, BatchResultMismatch, ConfigError, InvalidRequest, Serving
from forebay.errors import BadOutcome, ModelError


def cat(*rows):
    return Batch.concatenate([np.array(rows)])


def doubled(options):
    return lambda batch: batch.realize() * 2


class Simple:
    """Upstream's module of the same name: says what it is called with."""

    def __init__(self):
        self.log = []

    def init(self, kind, arg, partitions):
        self.log.append(("init", kind, arg, [dict(one) for one in partitions]))
        return "state"

    def handle_batch(self, batch, partition, state) -> Any:
        self.log.append(("batch", batch.size, partition, state))
        return (lambda: (batch.realize() * 2, "metadata")), state


def test_a_function_gets_its_options_and_returns_the_function_for_batches():
    # S16
    seen = []

    def fn(options):
        seen.append(dict(options))
        with pytest.raises(TypeError):
            options["x"] = 1
        return lambda batch: batch.pad(1).realize()

    assert Serving.new(fn, level=3).run(cat(1, 2)).tolist() == [1, 2]
    assert seen == [{"level": 3}]


@pytest.mark.parametrize("wrong", [3, None, lambda: None, lambda a, b: None])
def test_what_a_function_returns_must_take_one_argument(wrong):
    # S16
    def maker(options):
        return wrong

    with pytest.raises(ConfigError, match=r"maker should return.*function that expects one argument\. Got: "):
        Serving.new(maker).run(cat(1))


def test_a_function_of_two_parameters_is_called_for_each_key():
    # S17
    seen = []

    def fn(key, options):
        seen.append(key)
        return lambda batch: batch.realize() * (2 if key == "foo" else 3)

    serving = Serving.new(fn)
    assert serving.run(cat(1).key("foo")).tolist() == [2]
    assert serving.run(cat(1).key("bar")).tolist() == [3]
    assert seen == ["foo", "bar"]


def test_jit_takes_and_returns_trees():
    # S18
    a, b = Serving.jit(lambda t: (t[0] * 2, t[1] / 2)).run(Batch.stack([(1, 2), (3, 4)]))
    assert (a.tolist(), b.tolist()) == ([2, 6], [1.0, 2.0])


def test_a_module_is_initialised_with_kind_arg_and_partitions():
    # S19
    module = Simple()
    assert Serving.new(module, arg="arg", a=1).run(cat(1, 2)).tolist() == [2, 4]
    assert module.log == [
        ("init", "inline", "arg", [{"a": 1, "batch_keys": ["default"]}]),
        ("batch", 2, 0, "state"),
    ]
    assert Serving.new(Simple).run(cat(3)).tolist() == [6]  # a class is made without arguments


def test_what_is_neither_function_nor_module_is_refused():
    # S19
    class NoBatch:
        def init(self, kind, arg, partitions): ...

    with pytest.raises(ConfigError, match="has no handle_batch"):
        Serving.new(NoBatch)
    with pytest.raises(ConfigError, match="got 3"):
        Serving.new(3)
    with pytest.raises(ConfigError, match="takes 3 arguments"):
        Serving.new(lambda a, b, c: None)
    with pytest.raises(ConfigError, match="bind it with a closure"):
        Serving.new(doubled, arg=1)


def test_wrong_returns_name_the_module():
    # S20
    class BadInit(Simple):
        def init(self, kind, arg, partitions):
            raise ValueError("no weights")

    class BadHandle(Simple):
        def handle_batch(self, batch, partition, state) -> Any:
            return "what"

    class BadFunction(Simple):
        def handle_batch(self, batch, partition, state):
            return batch.realize, state

    class BadOutput(Simple):
        def handle_batch(self, batch, partition, state) -> Any:
            return (lambda: ("text", None)), state

    with pytest.raises(ModelError, match="BadInit could not be initialised: ValueError: no weights"):
        Serving.new(BadInit).run(cat(1))
    with pytest.raises(BadOutcome, match=r"BadHandle.handle_batch must return \(function, state\).*'what'"):
        Serving.new(BadHandle).run(cat(1))
    with pytest.raises(BadOutcome, match=r"BadFunction must return \(output, metadata\)"):
        Serving.new(BadFunction).run(cat(1))
    with pytest.raises(BadOutcome, match="BadOutput returned no tree of arrays"):
        Serving.new(BadOutput).run(cat(1))


def test_default_metadata_and_client_info():
    # S21, S23
    serving = Serving.new(doubled).client_postprocessing(lambda executed, info: (*executed, info))
    output, metadata, info = serving.run(cat(1, 2))
    assert (output.tolist(), metadata, info) == ([2, 4], "server_info", "client_info")


def test_pre_and_postprocessing_hand_the_client_info_on():
    # S22, S23
    serving = (
        Serving.new(doubled)
        .client_preprocessing(lambda rows: (Batch.stack(rows), {"count": len(rows)}))
        .client_postprocessing(lambda executed, info: {**info, "out": executed[0].tolist()})
    )
    assert serving.run([np.array([1]), np.array([2])]) == {"count": 2, "out": [[2], [4]]}


@pytest.mark.parametrize("wrong", [np.zeros(3), "text", {"a": 1}, 3, None])
def test_without_preprocessing_only_batches_are_taken(wrong):
    # S22
    with pytest.raises(InvalidRequest, match=r"takes a Batch or an iterable of Batch, got .*Batch\.stack"):
        Serving.new(doubled).run(wrong)


@pytest.mark.parametrize("wrong", [None, (1, 2, 3), (np.zeros(2), None), cat(1)])
def test_preprocessing_must_return_batch_and_info(wrong):
    # S22
    def prepare(_):
        return wrong

    with pytest.raises(ConfigError, match=r"prepare must return a two-element tuple"):
        Serving.new(doubled).client_preprocessing(prepare).run(1)


def test_run_starts_no_thread_and_runs_in_the_caller():
    # S24, S25
    idents = []

    def fn(options):
        def run(batch):
            idents.append((threading.get_ident(), threading.active_count()))
            return batch.realize()

        return run

    before = threading.active_count()
    Serving.new(fn).run(cat(1))
    ((ident, threads),) = idents
    assert ident == threading.get_ident()
    assert threads <= before  # one of another test may end meanwhile


@pytest.mark.parametrize("rows,sizes", [(1, [1]), (2, [2]), (3, [2, 1]), (4, [2, 2])])
def test_inputs_larger_than_the_batch_size_are_split_and_joined(rows, sizes):
    # S26; section 9: limit - 1, limit, limit + 1
    seen = []

    def fn(options):
        def run(batch):
            seen.append(batch.size)
            return {"x": batch.realize() * 2}

        return run

    out = Serving.new(fn).batch_size(2).run(cat(*range(rows)))
    assert seen == sizes
    assert out["x"].tolist() == [2 * row for row in range(rows)]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True])
def test_a_batch_size_is_a_positive_number(wrong):
    # S26
    with pytest.raises(ValueError, match="batch_size: expected a whole number"):
        Serving.new(doubled).batch_size(wrong)


def test_padding_never_reaches_the_caller():
    # S27
    def fn(options):
        return lambda batch: batch.pad(4 - batch.size).realize()

    assert Serving.new(fn).run(cat(1, 2)).tolist() == [1, 2]


def test_fewer_rows_than_asked_for_are_an_error():
    # S27
    with pytest.raises(BatchResultMismatch, match="returned 1 row for a batch of 2"):
        Serving.new(lambda options: lambda batch: batch.realize()[1:]).run(cat(1, 2))


def test_iterables_are_executed_one_after_another():
    # S28
    seen = []

    def fn(options):
        return lambda batch: (seen.append(batch.size), batch.realize())[1]

    def batches():
        yield cat(1, 2)
        assert seen == [2]  # the first one was executed before the second one is asked for
        yield cat(3)

    assert Serving.new(fn).batch_size(2).run(batches()).tolist() == [1, 2, 3]
    assert Serving.new(fn).run([cat(1), cat(2)]).tolist() == [1, 2]


@pytest.mark.parametrize("item", [3, cat(1, 2, 3)])
def test_iterables_hold_batches_that_fit(item):
    # S28
    with pytest.raises(
        InvalidRequest, match=r"client_preprocessing must return a stream of Batch of maximum size 2, got: "
    ):
        Serving.new(doubled).batch_size(2).client_preprocessing(lambda rows: (rows, None)).run([cat(1), item])


def test_nothing_runs_for_an_empty_batch():
    # S29
    def fn(options):
        pytest.fail("was initialised")

    for nothing in (Batch(), [Batch()], []):
        with pytest.raises(InvalidRequest, match="cannot run with empty Batch"):
            Serving.new(fn).run(nothing)


def test_init_is_called_once_for_each_run_and_once_for_all_when_warm():
    # S30
    module = Simple()
    serving = Serving.new(module).batch_size(1)
    serving.run(cat(1, 2, 3))
    serving.run(cat(1))
    assert [entry[0] for entry in module.log].count("init") == 2
    module.log.clear()
    assert serving.warm() is serving
    serving.run(cat(1, 2))
    serving.run(cat(1))
    assert [entry[0] for entry in module.log].count("init") == 1


def test_values_compare_print_and_never_change():
    # S31
    serving = Serving.new(doubled, level=1)
    assert serving == Serving.new(doubled, level=1)
    assert serving != serving.batch_size(2)
    assert serving.batch_size(2) == serving.batch_size(2)
    assert serving.settings.batch_size is None
    assert Serving.jit(doubled) == Serving.jit(doubled)
    assert repr(serving.batch_size(2).streaming()) == "Serving(doubled, batch_size=2, streaming=[], level=1)"
    with pytest.raises(AttributeError, match="cannot be changed"):
        serving.settings = serving.settings
    assert serving.defn_options(level=2) == Serving.new(doubled, level=2)


@pytest.mark.slow
def test_a_type_checker_knows_what_run_takes_and_returns(tmp_path):
    # S31
    source = tmp_path / "typed.py"
    source.write_text(
        "from typing import Any\n"
        "from forebay import Batch, Serving\n"
        "def before(text: str) -> tuple[Batch, int]: return Batch.stack([len(text)]), 1\n"
        "def after(executed: Any, info: Any) -> list[float]: return [1.0]\n"
        "serving = Serving.new(lambda options: len).client_preprocessing(before).client_postprocessing(after)\n"
        "wrong: int = serving.run('x')\n"
        "serving.run(3)\n"
    )
    checker = Path(sys.executable).with_name("basedpyright")
    done = subprocess.run([checker, "--level", "error", source], capture_output=True, text=True, check=False)
    assert '"list[float]" is not assignable to "int"' in done.stdout
    assert '"Literal[3]" is not assignable to "str"' in done.stdout


def test_pad_to_batch_size_pads_inline_too():
    # S60
    seen = []

    def fn(options):
        def run(batch):
            rows = batch.realize()
            seen.append((batch.size, len(rows)))
            return rows

        return run

    serving = Serving.new(fn).batch_size(4).process_options(pad_to_batch_size=True)
    assert serving.run(cat(1, 2, 3, 4, 5)).tolist() == [1, 2, 3, 4, 5]
    assert seen == [(4, 4), (1, 4)]


def test_a_serving_in_a_test_needs_nothing_of_a_server():
    # S74
    code = (
        "import sys, forebay, numpy\n"
        "from forebay import Batch, Serving\n"
        "serving = Serving.jit(lambda x: x * 2)\n"
        "batch = Batch.concatenate([numpy.arange(3)])\n"
        "assert serving.run(batch).tolist() == [0, 2, 4]\n"
        "with serving.start(batch_timeout_ms=1) as process:\n"
        "    assert process.batched_run(batch).tolist() == [0, 2, 4]\n"
        "heavy = {'uvicorn', 'starlette', 'httptools', 'uvloop', 'prometheus_client', 'pydantic', 'torch', 'jax'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_servings_with_arrays_are_compared_by_their_values():
    # F37
    def made(last, **options):
        return Serving.new(Recording, arg={"weights": [np.array([1, last])], "name": "x"}, **options)

    assert made(2) == made(2)
    assert made(2) != made(3)
    assert made(2, table=np.ones(3)) == made(2, table=np.ones(3))
    assert made(2, table=np.ones(3)) != made(2, table=np.ones(2))
    assert made(2) != made(2, table=None)


class Recording:
    def init(self, kind, arg, partitions):
        return arg

    def handle_batch(self, batch, partition, state):
        return (lambda: (batch.realize(), None)), state
