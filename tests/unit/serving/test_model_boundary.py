# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIncompatibleMethodOverride=false
"""What a model may return, await and yield, seen from the endpoint that serves it."""

from __future__ import annotations

import asyncio
import collections
import json
import threading

import numpy as np
import pytest
from tests.waiting import PATIENCE_S, timeouts
from tests.waiting import reached as eventually

from forebay import Failure, Model, RequestError
from forebay.batching.queue import BatchConfig
from forebay.errors import BadOutcome, Code, DeadlineExceeded, ForebayError, RunnerFailed
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.models.model_runner import ModelRunner
from forebay.types.call import Failure as Failed
from forebay.types.call import Request
from forebay.workers.pools.inline import InlinePool
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import RunnerSpec
from forebay.workers.user_calls.user_code import one_each

JSON = {"in": "json", "out": "json"}


class Desk:
    """A model behind an endpoint, in this process."""

    def __init__(self, model, kind="inline", slots=1, timeout_s=PATIENCE_S, streams=False, **batching):
        spec = RunnerSpec("", local=lambda: ModelRunner(model))
        seats = int(streams)
        self.pool = (
            InlinePool(spec, slots=slots, seats=seats)
            if kind == "inline"
            else ThreadPool(spec, workers=slots, seats=seats)
        )
        config = EndpointConfig(name="desk", timeout_s=timeout_s, streams=streams)
        self.endpoint = Endpoint(config, BatchConfig(**{"idle": "go", "max_size": 1, **batching}), self.pool)

    async def __aenter__(self):
        await self.endpoint.start()
        return self

    async def __aexit__(self, *_):
        await self.endpoint.drain(1.0)

    async def ask(self, sample, **more):
        return json.loads(await self.endpoint.call(json.dumps(sample).encode(), params=JSON, **more))


def run(main):
    asyncio.run(asyncio.wait_for(main, 2 * PATIENCE_S))


both = pytest.mark.parametrize("kind", ["inline", "thread"])


# Results


class ModelOutput(collections.OrderedDict):
    """As Hugging Face's: a mapping that is no plain dict, and gives values by number too."""

    def __getitem__(self, key):
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


class Table:
    """As a data frame: rows are counted, columns are walked over."""

    ndim = 2
    columns = ("a", "b")

    def keys(self):
        return self.columns

    def __iter__(self):
        return iter(self.columns)

    def __len__(self):
        return 2

    def __getitem__(self, key):
        return [1, 2]


class ColumnTable:
    """As a data frame of another library: neither keys nor a number of axes, rows counted and columns walked over."""

    columns = ("a", "b")

    def __iter__(self):
        return iter([[1, 2], [3, 4]])

    def __len__(self):
        return 2

    def __getitem__(self, key):
        return [1, 2]


class Sparse:
    """As a sparse matrix, which does not tell how many rows it has."""

    ndim = 2

    def __len__(self):
        raise TypeError("sparse array length is ambiguous")

    def __getitem__(self, key):
        return [1, 2]


RETURNED = {
    "dict": {"a": 1, "b": 2},
    "OrderedDict": collections.OrderedDict(a=1, b=2),
    "ModelOutput": ModelOutput(a=1, b=2),
    "ChainMap": collections.ChainMap({"a": 1, "b": 2}),
    "Table": Table(),
    "ColumnTable": ColumnTable(),
    "Sparse": Sparse(),
    "str": "ab",
    "bytearray": bytearray(b"ab"),
    "set": {1, 2},
    "ndarray": np.array(2),
    "int": 2,
    "None, perhaps because its `return` is missing": None,
}


@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("is_async", [False, True])
@both
def test_what_is_no_list_of_results_is_told_so(kind, name, is_async):  # F28
    class Wrong(Model):
        def predict(self, batch):
            return RETURNED[name]

    class WrongAsync(Model):
        async def predict(self, batch):
            return RETURNED[name]

    async def main():
        async with Desk(
            WrongAsync if is_async else Wrong, kind, max_size=2, idle="wait", max_wait_s=PATIENCE_S
        ) as desk:
            failed = await asyncio.gather(desk.ask(1), desk.ask(2), return_exceptions=True)
            assert [type(error) for error in failed] == [BadOutcome] * 2
            assert name in failed[0].message
            assert "a list with one result for each of 2 samples" in failed[0].message

    run(main())


def test_a_generator_that_is_returned_may_be_made_a_list():
    """As that of `nlp.pipe(batch)`, which is no stream."""
    with pytest.raises(BadOutcome, match=r"predict returned a generator; .* for each of 2 samples .*`list\(...\)`"):
        one_each((each for each in "ab"), 2)


@both
def test_arrays_tuples_and_series_are_results(kind):  # F28
    class Series:
        ndim = 1

        def __init__(self, values):
            self.values = values

        def keys(self):
            return range(len(self.values))

        def __iter__(self):
            return iter(self.values)

        def __len__(self):
            return len(self.values)

        def __getitem__(self, key):
            return self.values[key]

    class Right(Model):
        def predict(self, batch):
            make = {"array": np.array, "tuple": tuple, "series": Series}[batch[0]]
            return make([7.0] * len(batch))

    async def main():
        async with Desk(Right, kind) as desk:
            assert [await desk.ask(name) for name in ("array", "tuple", "series")] == [7.0] * 3

    run(main())


class NoInit(RequestError):
    def __init__(self):
        pass


@both
def test_a_failure_that_holds_anything_is_a_failure_of_its_sample(kind):  # F27
    held = [ValueError("caf\udce9"), "text", None, NoInit(), KeyboardInterrupt()]

    class Fails(Model):
        def predict(self, batch):
            return [Failure(held[sample]) if sample >= 0 else "fine" for sample in batch]

    async def main():
        async with Desk(Fails, kind, max_size=6, idle="wait", max_wait_s=PATIENCE_S) as desk:
            asked = [desk.ask(number) for number in (*range(5), -1)]
            *failed, fine = await asyncio.gather(*asked, return_exceptions=True)
            assert [error.code for error in failed] == [Code.INTERNAL] * 3 + [Code.INVALID_ARGUMENT, Code.INTERNAL]
            assert fine == "fine"

    run(main())


@pytest.mark.parametrize("hook", ["preprocess", "postprocess"])
@pytest.mark.parametrize("is_async", [False, True])
@both
def test_what_a_hook_raises_fails_its_sample_only(kind, hook, is_async):  # F18
    def step(self, sample):
        if sample == 1:
            raise KeyboardInterrupt
        return sample

    async def step_async(self, sample):
        return step(self, sample)

    members = {"predict": lambda self, batch: batch, hook: step_async if is_async else step}
    hooked = type("Hooked", (Model,), members)

    async def main():
        async with Desk(hooked, kind, max_size=2, idle="wait", max_wait_s=PATIENCE_S) as desk:
            failed, fine = await asyncio.gather(desk.ask(1), desk.ask(2), return_exceptions=True)
            assert (type(failed), fine) == (RunnerFailed, 2)

    run(main())


# Answers of last resort


def test_a_transport_that_cannot_write_an_answer_writes_an_error_in_its_place():  # F27, G8
    replies = []

    def reply(request, outcome):
        replies.append(outcome)
        if type(outcome) is not Failed or outcome.error.kind != "InternalError":
            raise ValueError("cannot be written")

    class Echo(Model):
        def predict(self, batch):
            return [ValueError() if sample else sample for sample in batch]

    async def main():
        async with Desk(Echo) as desk:
            for body in (b"0", b"1", b"nonsense"):
                replies.clear()
                desk.endpoint.submit(Request(body=body, reply=reply, params=JSON))
                await eventually(lambda: len(replies) == 2)
                assert replies[1].error.code is Code.INTERNAL

    run(main())


# Coroutines on the server's loop


def test_slots_of_the_loop_are_filled():  # F30
    class Meets(Model):
        def load(self):
            self.here = 0
            self.all = asyncio.Event()

        async def predict(self, batch):
            self.here += 1
            if self.here == 8:
                self.all.set()
            await self.all.wait()
            return batch

    async def main():
        async with Desk(Meets, slots=8) as desk:
            assert await asyncio.gather(*map(desk.ask, range(8))) == list(range(8))

    run(main())


@pytest.mark.parametrize("kind", ["inline", "thread"])
def test_a_coroutine_that_awaits_for_ever_is_cancelled_at_the_deadline(kind):  # F30
    ended = threading.Event()

    class Waits(Model):
        async def predict(self, batch):
            if batch[0] == "wait":
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()
            return batch

    async def main():
        async with Desk(Waits, kind) as desk:
            for timeout_s in timeouts():
                with pytest.raises(DeadlineExceeded):
                    await desk.ask("wait", timeout_s=timeout_s)
                assert await desk.ask("next") == "next"
                if ended.is_set():
                    break
            assert ended.is_set()
            asking = asyncio.ensure_future(desk.ask("wait"))
            await eventually(lambda: desk.pool.idle == 0)
            ended.clear()
            asking.cancel()
            assert await desk.ask("next") == "next"
            assert ended.is_set()

    run(main())


@both
def test_load_and_unload_may_be_coroutines(kind):  # F30
    class Loads(Model):
        closed = threading.Event()

        async def load(self):
            await asyncio.sleep(0)
            self.loop = asyncio.get_running_loop()

        async def predict(self, batch):
            return [asyncio.get_running_loop() is self.loop] * len(batch)

        async def unload(self):
            await asyncio.sleep(0)
            self.closed.set()

    async def main():
        async with Desk(Loads, kind) as desk:
            assert await desk.ask(0) is True
        await eventually(Loads.closed.is_set)

    run(main())


@both
@pytest.mark.parametrize("is_async", [False, True])
def test_a_generator_is_closed_when_the_client_leaves(kind, is_async):  # F31
    closed = threading.Event()

    class Streams(Model):
        def predict(self, batch):
            try:
                while True:
                    yield ["part"] * len(batch)
            finally:
                closed.set()

    class StreamsAsync(Model):
        async def predict(self, batch):
            try:
                yield ["part"] * len(batch)
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                closed.set()

    async def main():
        async with Desk(StreamsAsync if is_async else Streams, kind, streams=True) as desk:
            parts = []
            request = Request(body=b"1", reply=lambda *_: None, params=JSON, on_part=lambda *part: parts.append(part))
            desk.endpoint.submit(request)
            await eventually(lambda: parts)
            desk.endpoint.cancel(request)
            for _, release in parts:
                release()
            await eventually(closed.is_set)
            await eventually(lambda: desk.pool.idle == 1)

    run(main())


def test_a_class_of_the_users_is_told_as_the_nearest_of_ours():  # F27
    class Gone(RequestError):
        pass

    assert isinstance(Gone("x"), ForebayError)
    assert Gone("x").kind == "RequestError"
