# SPDX-License-Identifier: Apache-2.0
"""Versions come and go while an app runs: nothing is dropped, and nobody who is not ready is asked."""

import asyncio
import threading
import time
from typing import Any

import pytest
from tests.waiting import PATIENCE_S, reached

from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError, ForebayError, InvalidRequest, ModelError, NotFound, Unavailable
from forebay.protocols.native import Contract
from forebay.server.app import App
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.workers.pools.inline import InlinePool
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import Runner, RunnerSpec


class Tells(Runner):
    """Answers with what it was made with, once it may."""

    def __init__(self, version, until=None, problem=None):
        self.version = version
        self.until = until
        self.problem = problem

    def open(self, ctx):
        if self.problem is not None:
            raise self.problem

    def run(self, items):
        if self.until is not None:
            self.until.wait(PATIENCE_S)
        return [self.version] * len(items)

    def close(self):
        self.version = "closed"


def served(version="1", *, name="iris", kind: Any = ThreadPool, weight=None, **more):
    spec = RunnerSpec(factory="", local=lambda: Tells(version, **more))
    return Served(
        Endpoint(EndpointConfig(name=name, version=version), BatchConfig(), kind(spec)), Contract(), weight=weight
    )


def run(*given):
    """Runs an async test with an app of its own."""

    def decorate(test):
        def wrapped():
            async def main():
                app = App([served(*one) if isinstance(one, tuple) else one() for one in given])
                await app.start()
                try:
                    await asyncio.wait_for(test(app), PATIENCE_S)
                finally:
                    await app.drain(5.0)

            asyncio.run(main())

        return wrapped

    return decorate


def ask(app, name="iris"):
    return app.versions(name).turn().endpoint.call(b"")


def states(app, name="iris"):
    return {(one["version"], one["state"], one["weight"]) for one in app.describe(name)["versions"]}


@run(("1",))
async def test_a_version_that_was_loaded_waits_for_a_weight(app):  # F51: two versions needed two names
    await app.load("iris", "2", lambda: served("2"))
    assert states(app) == {("1", "ready", 1), ("2", "ready", 0)}
    assert {await ask(app) for _ in range(5)} == {"1"}
    assert await app.versions("iris").ready["2"].endpoint.call(b"") == "2"
    assert app.describe("iris")["version"] == "1"
    assert app.describe("iris", "2")["version"] == "2"
    app.share("iris", {"2": 1})
    assert {await ask(app) for _ in range(5)} == {"2"}
    assert app.describe("iris")["version"] == "2"


@run(("1",))
async def test_weights_are_kept_in_even_turns(app):
    await app.load("iris", "2", lambda: served("2"))
    app.share("iris", {"1": 90, "2": 10})
    answers = [await ask(app) for _ in range(100)]
    assert answers.count("2") == 10
    assert all(answers[start : start + 10].count("2") == 1 for start in range(0, 100, 10))
    app.share("iris", {"1": 2, "2": 1})
    assert [await ask(app) for _ in range(6)] == ["1", "2", "1", "1", "2", "1"]


@run(lambda: served("1", until=threading.Event()))
async def test_the_one_that_is_replaced_answers_what_it_accepted_and_leaves(app):
    until = app.find("iris").endpoint.pool._workers[0].runner.until
    before = app.find("iris").endpoint
    late = asyncio.ensure_future(ask(app))
    await reached(lambda: before.pool.idle == 0)
    await app.load("iris", "1", lambda: served("1", until=until))
    assert states(app) == {("1", "ready", 1), ("1", "leaving", 1)}
    after = app.find("iris").endpoint
    assert after is not before
    assert after.metrics is before.metrics
    await reached(lambda: not before.accepting)
    with pytest.raises(Unavailable):
        await before.call(b"")
    until.set()
    assert await late == "1"
    assert await ask(app) == "1"
    await reached(lambda: states(app) == {("1", "ready", 1)})


@run(("1",))
async def test_a_swap_takes_the_place_of_whoever_had_weight(app):
    left = []
    app.on_left = lambda: left.append(1)
    await app.swap("iris", "2", lambda: served("2"))
    assert await ask(app) == "2"
    await reached(lambda: states(app) == {("2", "ready", 1)})
    assert left == [1]


def hangs():
    time.sleep(60)


def raises():
    raise ConfigError("no such file")


@pytest.mark.parametrize(
    "make, reason",
    [
        (raises, "no such file"),
        (hangs, "not ready in time"),
        (lambda: served("3"), "version '2' was wanted, and it is 'iris' version '3'"),
        (lambda: served("2", problem=OSError("no weights")), "no weights"),
        (lambda: served("2", kind=InlinePool, problem=OSError("no weights")), "no weights"),
        (lambda: 1 / 0, "division by zero"),
    ],
    ids=["cannot be built", "hangs", "is another one", "cannot load", "cannot load inline", "raises"],
)
@pytest.mark.parametrize("version", ["1", "2"])
def test_what_cannot_be_loaded_leaves_all_as_it_was(make, reason, version):
    async def test(app):
        served_before = dict(app.served)
        with pytest.raises(ForebayError, match=r"." if version == "1" else reason):
            await app.load("iris", version, make, timeout_s=0.3)
        assert app.served == served_before
        assert await ask(app) == "1"
        (failed,) = [one for one in app.describe("iris")["versions"] if one["state"] == "failed"]
        assert failed["version"] == version
        assert failed["error"]
        assert app.problems() == []
        await app.load("iris", version, lambda: served(version))
        assert not [one for one in app.describe("iris")["versions"] if one["state"] == "failed"]

    run(("1",))(test)()


@run(("1",))
async def test_a_load_that_hangs_ends_in_time_and_its_worker_does_not_stay(app):
    entered, over = threading.Event(), threading.Event()

    class Hangs(Tells):
        def open(self, ctx):
            entered.set()
            over.wait(PATIENCE_S)

    def make():
        pool = ThreadPool(RunnerSpec(factory="", local=lambda: Hangs("2")))
        return Served(Endpoint(EndpointConfig(name="iris", version="2"), BatchConfig(), pool), Contract())

    loading = asyncio.ensure_future(app.load("iris", "2", make, timeout_s=0.5))
    await reached(entered.is_set)
    assert states(app) == {("1", "ready", 1), ("2", "loading", 0)}
    with pytest.raises(ModelError, match="not ready in time"):
        await loading
    assert await ask(app) == "1"
    over.set()


@run(("1",))
async def test_models_join_and_leave(app):
    changes = []
    app.watch(lambda _name: changes.append(set(app.served)))
    await app.load("rose", "7", lambda: served("7", name="rose"))
    assert await ask(app, "rose") == "7"
    await app.unload("rose", "7")
    assert changes == [{"iris", "rose"}, {"iris"}]
    with pytest.raises(NotFound, match="did you mean"):
        app.find("irs")
    with pytest.raises(NotFound):
        app.find("rose")
    with pytest.raises(NotFound, match="no version '9'"):
        await app.unload("iris", "9")
    await reached(lambda: "rose" not in {one["name"] for one in app.describe_all()})


@run(("1",), ("2",))
async def test_who_answers_for_all_does_not_leave_before_another_takes_over(app):
    with pytest.raises(InvalidRequest, match="give another one weight first"):
        await app.unload("iris", "1")
    for weights in ({}, {"1": 0}, {"1": 2, "2": -1}):
        with pytest.raises(InvalidRequest, match="whole numbers"):
            app.share("iris", weights)
    with pytest.raises(NotFound, match="no version '3'"):
        app.share("iris", {"3": 1})
    app.share("iris", {"2": 1})
    await app.unload("iris", "1")
    assert await ask(app) == "2"


def test_a_long_load_is_no_silence(monkeypatch, caplog):
    monkeypatch.setattr("forebay.server.app.LOADING_TOLD_S", 0.01)
    caplog.set_level("INFO", "forebay")
    may_end = threading.Event()

    class Slow(Tells):
        def open(self, ctx):
            may_end.wait(PATIENCE_S)

    async def main():
        one = served()
        one.endpoint.pool = ThreadPool(RunnerSpec(factory="", local=lambda: Slow("1")))
        app = App([one])
        starting = asyncio.create_task(app.start())
        try:
            await reached(lambda: "not ready yet: model 'iris' is loading" in caplog.messages)
            with pytest.raises(Unavailable, match="'iris' is still being loaded; try again later"):
                await ask(app)
        finally:
            may_end.set()
        await starting
        assert await ask(app) == "1"
        await app.drain(0.0)
        with pytest.raises(Unavailable, match="accepts no more requests"):
            await one.endpoint.call("x")

    asyncio.run(main())


@run(("1",))
async def test_what_is_built_too_late_lets_go_of_what_it_used(app):
    has_begun, may_end, gone = threading.Event(), threading.Event(), threading.Event()

    def make():
        has_begun.set()
        may_end.wait(PATIENCE_S)
        built = served("2")
        built.gone = gone.set
        return built

    timeout_s = 0.05
    while not has_begun.is_set():  # on a crowded machine the time may be over before
        with pytest.raises(ModelError, match="version '2' of 'iris' was not ready in time"):
            await app.load("iris", "2", make, timeout_s=timeout_s)
        timeout_s *= 2
    assert not gone.is_set()
    may_end.set()
    await reached(gone.is_set)
    assert await ask(app) == "1"


@run(("1",))
async def test_who_stops_waiting_does_not_stop_a_load(app):
    go = threading.Event()

    def make():
        go.wait(PATIENCE_S)
        return served("2")

    waiting = asyncio.ensure_future(app.load("iris", "2", make))
    await reached(lambda: ("2", "loading", 0) in states(app))
    waiting.cancel()
    go.set()
    await reached(lambda: ("2", "ready", 0) in states(app))


def test_an_app_that_drains_gives_up_what_it_loads_and_waits_for_what_leaves():
    until, opened = threading.Event(), []

    async def main():
        app = App([served("1", until=until)])
        await app.start()
        before = app.find("iris").endpoint
        late = asyncio.ensure_future(ask(app))
        await reached(lambda: before.pool.idle == 0)
        await app.load("iris", "1", lambda: served("1"))
        loading = asyncio.ensure_future(
            app.load("iris", "2", lambda: opened.append(until.wait(PATIENCE_S)) or served("2"))
        )
        await asyncio.sleep(0)
        draining = asyncio.ensure_future(app.drain(30.0))
        with pytest.raises(Unavailable, match="the server is draining"):
            await loading
        with pytest.raises(Unavailable, match="draining"):
            await app.load("iris", "3", lambda: served("3"))
        until.set()
        assert await late == "1"
        await draining
        assert not before.accepting

    asyncio.run(main())


@run(("1",), ("2",), ("3",))
async def test_all_versions_come_and_go_together_however_many_say_so(app):
    app.source = lambda name, version: served(version, name=name)
    index = app.model_index

    async def told():
        return {(one["version"], one["state"]) for one in await index.index()}

    async def after(turns, call):
        for _ in range(turns):
            await asyncio.sleep(0)
        await call("iris")

    for _ in range(3):
        found = await asyncio.gather(*(after(number, index.unload) for number in range(8)), return_exceptions=True)
        assert found[0] is None
        assert all(isinstance(one, NotFound) for one in found[1:])
        await reached(lambda: "iris" not in app.ready)
        assert {version for version, _ in await told()} == {"1", "2", "3"}
        await index.load("iris")
        assert await told() >= {("1", "READY"), ("2", "READY"), ("3", "READY")}
    for turns in range(1, 12):
        calls = [index.load("iris"), *(after(turns * number, index.unload) for number in range(1, 4))]
        await asyncio.gather(*calls, return_exceptions=True)
        await index.load("iris")
        assert {version for version, state in await told() if state == "READY"} == {"1", "2", "3"}


def test_weights_that_files_name_hold_from_the_start():
    app = App([served("1", weight=9), served("2", weight=1), served("5", name="rose"), served("6", name="rose")])
    assert app.versions("iris").weights == {"1": 9, "2": 1}
    assert app.versions("rose").weights == {"5": 1}
    with pytest.raises(ConfigError, match=r"two models are named 'iris'.*another `version`"):
        App([served("1"), served("1")])
