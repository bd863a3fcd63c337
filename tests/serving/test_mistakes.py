# SPDX-License-Identifier: Apache-2.0
"""What people get wrong about servings on their first day: each is one sentence that says what to write instead."""

import asyncio

import numpy as np
import pytest

import forebay
from forebay import Batch, Serving
from forebay.errors import ConfigError, InvalidRequest, ModelError

ROW = Batch.stack([np.array([1.0])])


@pytest.mark.parametrize(
    "entry, told",
    [
        (
            {"input_ids": [1, 2, 3]},
            r"\$\.input_ids is a list of numbers, .* one array each; write np\.array\(\[1, 2, 3\]\)",
        ),
        ([0.5, 1.5], r"\$ is a list of numbers, .*; write np\.array\(\[0\.5, 1\.5\]\)"),
        (
            {"a": np.ones(2), "b": (3, [[1], [2]])},
            r"\$\.b\[1\] is a list of numbers, .*; write np\.array\(\[\[1\], \[2\]\]\)",
        ),
    ],
)
def test_a_list_of_numbers_is_no_array(entry, told):  # F60
    with pytest.raises(InvalidRequest, match=told):
        Batch.stack([entry])


@pytest.mark.parametrize("entry", [1, {"a": 1}, (1, 2), [np.array(1), np.array(2)], [1, np.array(2)]])
def test_numbers_and_lists_of_arrays_are_trees(entry):  # F60
    assert Batch.stack([entry]).size == 1


class Module:
    """As torch's: called with arrays."""

    def __call__(self, rows):
        return rows


@pytest.mark.parametrize("given", [lambda x: x * 2, np.exp, Module(), np.tanh], ids=["lambda", "exp", "module", "tanh"])
def test_a_function_of_arrays_given_to_new_is_told_of_jit(given):  # F60
    with pytest.raises((ConfigError, ModelError), match=r"a function of arrays itself goes to Serving\.jit"):
        Serving.new(given).run(ROW)


def test_a_hook_with_its_arguments_swapped_is_told():  # F60
    with pytest.raises(ConfigError, match=r"hook\(name, x\).* .* its name is a text, got ndarray: write hook\('mean'"):
        forebay.hook(np.ones(2), "mean")  # pyright: ignore[reportArgumentType]


def test_the_name_of_a_hook_in_place_of_a_list_of_names_is_told():  # S58
    with pytest.raises(
        ConfigError, match=r"hooks: expected a list of names, got the string 'double'; write hooks=\['double'\]"
    ):
        Serving.jit(lambda x: x).streaming(hooks="double")


def test_an_iterable_of_something_else_is_not_blamed_on_a_preprocessing_that_there_is_not():  # F60
    serving = Serving.jit(lambda x: x)
    with pytest.raises(InvalidRequest, match=r"^without a client_preprocessing .* Batch\.stack\(\[row, \.\.\.\]\)"):
        serving.run([np.array([1.0])])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match=r"^client_preprocessing must return a stream of Batch"):
        serving.client_preprocessing(lambda rows: (rows, None)).run([np.array([1.0])])


def test_a_misspelt_option_of_jit_has_a_hint():  # F60
    with pytest.raises(ConfigError, match="did you mean 'compiler'"):
        Serving.jit(lambda x: x, compilr="jax").run(ROW)


def test_a_generator_that_cannot_read_the_stream_it_gets_is_told_at_once():  # F60
    def events(stream, info):
        yield from stream

    async def events_async(stream, info):
        async for event in stream:
            yield event

    def serving(fn):
        return Serving.jit(lambda x: x).streaming().client_postprocessing(fn)

    async def run(fn):
        with serving(fn).start("mistakes"):
            return [event async for event in await forebay.batched_run_async("mistakes", ROW)]

    assert len(asyncio.run(run(events_async))) == 1
    with pytest.raises(
        ConfigError, match=r"events is a generator function; .* write it with `async def` and `async for`"
    ):
        asyncio.run(run(events))
    assert len(list(serving(events).run(ROW))) == 1
    with pytest.raises(ConfigError, match="events_async is an async generator function; await batched_run_async"):
        serving(events_async).run(ROW)
