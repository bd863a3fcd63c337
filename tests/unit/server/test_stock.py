# SPDX-License-Identifier: Apache-2.0
"""Models of repositories in an app: they are loaded, swapped, and leave when there is no room."""

import asyncio
import contextlib
import difflib
import threading
from typing import Any

import pytest
from tests.waiting import PATIENCE_S, reached

from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError, ModelError, NotFound, Unavailable
from forebay.observe.metrics.repository_metrics import RepositoryCollector
from forebay.protocols.native import Contract
from forebay.repository.local_source import LocalFolder
from forebay.repository.repository import Repository
from forebay.repository.tree_rules import TreeRules
from forebay.repository.version_policy import VersionPolicy
from forebay.server import stock_report
from forebay.server.app import App
from forebay.server.model_reload import WantedModel, reload
from forebay.server.served import Served
from forebay.server.stock import Stock
from forebay.server.stock_offer import FIRST_PAUSE_S, Stocked
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.workers.pools.inline import InlinePool
from forebay.workers.runner import Runner, RunnerSpec


class Files:
    """A folder of models, whose content is what they answer with; `bad` cannot be loaded."""

    def __init__(self, folder):
        self.folder = folder
        self.loads = []
        self.not_now = set()
        self.may_load = threading.Event()
        self.may_load.set()

    def put(self, address, text):
        path = self.folder / address / "text"
        path.parent.mkdir(parents=True, exist_ok=True)
        coming = self.folder / ".coming"
        coming.write_text(text)
        coming.rename(path)

    def remove(self, address):
        (self.folder / address / "text").unlink()

    def make(self, revision, folder):
        self.loads.append((revision.model, revision.number))
        self.may_load.wait(PATIENCE_S)
        text = (folder / "text").read_text()
        if text == "bad" or text in self.not_now:
            raise ModelError("it is bad")
        config = EndpointConfig(name=revision.model, version=str(revision.number))
        pool = InlinePool(RunnerSpec("", local=lambda: Says(text)), slots=4)
        return Served(Endpoint(config, BatchConfig(), pool), Contract())


class Says(Runner):
    def __init__(self, text):
        self.text = text

    async def run_async(self, items):
        for item in items:
            if isinstance(item.body, asyncio.Event):
                await item.body.wait()
        return [self.text] * len(items)

    def run(self, items):
        return [self.text] * len(items)

    def close(self):
        self.text = "closed"


class Served_:
    """An app with a stock."""

    def __init__(self, files, app, stock, repository):
        self.files, self.app, self.stock, self.repository = files, app, stock, repository

    async def ask(self, name, version=None, body: Any = b""):
        async with self.stock.lend(name, version) as served:
            return await served.endpoint.call(body)

    async def look(self):
        """Looks twice, so that what has changed counts, and waits for what comes of it."""
        for _ in range(2):
            await asyncio.to_thread(self.repository.look)
        self.stock._tend_all()
        await self.rest()

    async def rest(self):
        await reached(lambda: not (self.stock._tending or self.stock._loading or self.stock._leaving))

    def versions(self, name):
        return {one["version"]: one["state"] for one in self.app.describe_versions(name)}


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path / "models")


@contextlib.asynccontextmanager
async def serving(files, policy="latest", **more):
    files.folder.mkdir(exist_ok=True)
    repository = Repository(LocalFolder(files.folder), TreeRules(kind="models"), poll_s=0)
    repository.look()
    repository.look()
    app = App([])
    stock = Stock(app, [Stocked(repository, files.make)], VersionPolicy.of(policy), **more)
    app.source = stock.find
    await app.start()
    try:
        yield Served_(files, app, stock, repository)
    finally:
        await app.drain(0.0)


def run(test):
    def wrapped(files):
        asyncio.run(asyncio.wait_for(test(files), PATIENCE_S))

    wrapped.__name__ = test.__name__
    return wrapped


@run
async def test_a_model_is_loaded_by_the_first_who_asks_and_once(files):  # N106
    files.put("a/1", "one")
    files.put("b/1", "other")
    async with serving(files) as found:
        assert found.app.problems() == []
        assert found.versions("a") == {"1": "available"}
        files.may_load.clear()
        asking = [asyncio.ensure_future(found.ask("a")) for _ in range(5)]
        await reached(lambda: files.loads)
        assert found.versions("a") == {"1": "loading"}
        files.may_load.set()
        assert await asyncio.gather(*asking) == ["one"] * 5
        assert files.loads == [("a", 1)]
        assert found.app.describe("a")["ready"]
        assert {one["name"]: one["ready"] for one in found.app.describe_all()} == {"a": True, "b": False}


@run
async def test_all_are_there_from_the_start_but_for_what_is_broken(files):
    files.put("a/1", "one")
    files.put("a/2", "bad")
    files.put("b/3", "bad")
    async with serving(files, is_lazy=False) as found:
        assert await found.ask("a") == "one"  # the highest that could be loaded
        assert found.versions("a") == {"1": "ready", "2": "failed"}
        with pytest.raises(ModelError, match="version '3' of 'b' cannot be loaded: it is bad"):
            await found.ask("b")
        assert set(found.app.served) == {"a"}


@run
async def test_the_least_recently_used_leaves_for_another(files):  # N120
    for name in "abc":
        files.put(f"{name}/1", name)
    async with serving(files, max_models=2) as found:
        for name in "abac":
            assert await found.ask(name) == name
        await found.rest()
        assert set(found.app.served) == {"a", "c"}
        assert files.loads == [("a", 1), ("b", 1), ("c", 1)]
        # What is asked past the stock, as over the fast lane, was used as well.
        await found.app.find("a").endpoint.call(b"")
        await found.ask("b")
        await found.rest()
        assert set(found.app.served) == {"a", "b"}


@run
async def test_what_is_in_use_stays_and_the_next_one_has_to_wait(files):  # N121
    files.put("a/1", "a")
    files.put("b/1", "b")
    async with serving(files, max_models=1) as found:
        await found.ask("a")
        answer = asyncio.Event()
        running = asyncio.ensure_future(found.app.find("a").endpoint.call(answer))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="there is no room for 'b': all that is in memory is in use; try again"):
            await found.ask("b")
        answer.set()
        assert await running == "a"
        assert await found.ask("b") == "b"
        await found.rest()
        assert set(found.app.served) == {"b"}


@run
async def test_what_a_thread_builds_while_another_model_leaves_disturbs_nobody(files):
    # A load failed with an error of a dict that had changed its size.
    class Building:
        @property
        def id(self):
            stock._there[object()] = self
            return ""

    files.put("a/1", "a")
    files.put("b/1", "b")
    async with serving(files, max_models=1) as found:
        await found.ask("a")
        stock: Any = found.stock
        stock._there = {object(): Building(), **stock._there}
        assert await found.ask("b") == "b"


@run
async def test_bytes_are_bounded_as_well(files):
    files.put("a/1", "aaaa")
    files.put("b/1", "bbb")
    files.put("c/1", "c" * 9)
    async with serving(files, max_bytes=6) as found:
        await found.ask("a")
        await found.ask("b")
        await found.rest()
        assert found.stock.statistics().bytes == 3
        with pytest.raises(Unavailable, match="there is no room"):
            await found.ask("c")
        assert await found.ask("b") == "bbb"


@run
async def test_a_new_version_takes_over_once_it_is_there(files):  # N109
    files.put("a/1", "one")
    async with serving(files, max_models=1) as found:
        assert await found.ask("a") == "one"
        answer = asyncio.Event()
        running = asyncio.ensure_future(found.ask("a", None, answer))
        await reached(lambda: found.app.find("a").endpoint.in_flight)
        files.put("a/2", "two")
        files.may_load.clear()
        looking = asyncio.ensure_future(found.look())
        await reached(lambda: ("a", 2) in files.loads)
        assert await found.app.find("a").endpoint.call(b"") == "one"  # as long as it is loading
        files.may_load.set()
        await reached(lambda: "2" in found.app.versions("a").weights)
        assert await found.ask("a") == "two"
        answer.set()
        assert await running == "one"
        await looking
        assert found.versions("a") == {"2": "ready", "1": "not served"}
        assert found.stock.statistics().loaded == 1
        with pytest.raises(NotFound, match="version 1 of the model 'a' exists but is not served; see --versions"):
            await found.ask("a", "1")


@run
async def test_other_files_of_the_same_version_are_loaded_in_its_place(files):  # N110
    files.put("a/1", "old")
    async with serving(files) as found:
        await found.ask("a")
        files.put("a/1", "new")
        await found.look()
        assert await found.ask("a") == "new"
        assert found.versions("a") == {"1": "ready"}


@run
async def test_what_cannot_be_loaded_leaves_all_as_it_was_until_it_heals(files):  # N107
    files.put("a/1", "one")
    async with serving(files) as found:
        await found.ask("a")
        files.put("a/2", "bad")
        await found.look()
        assert await found.ask("a") == "one"
        assert found.versions("a") == {"1": "ready", "2": "failed"}
        files.put("a/1", "bad")
        await found.look()
        assert await found.ask("a") == "one"
        files.put("a/2", "healed")
        await found.look()
        assert await found.ask("a") == "healed"
        assert found.versions("a")["2"] == "ready"


@run
async def test_what_is_broken_in_its_place_goes_on_and_no_lower_version_answers(files):
    for name in "ab":
        files.put(f"{name}/1", "one")
        files.put(f"{name}/2", "two")
    for is_lazy in (True, False):
        async with serving(files, is_lazy=is_lazy) as found:
            assert await found.ask("a") == "two"
            files.put("a/2", "bad")
            await found.look()
            assert await found.ask("a") == "two"
            assert await found.app.find("a").endpoint.call(b"") == "two"
            assert found.versions("a") == {"1": "not served", "2": "failed"}
            assert files.loads.count(("a", 1)) == 0
            files.put("a/3", "three")
            await found.look()
            assert await found.ask("a") == "three"
            assert ("2", "ready") not in [(one["version"], one["state"]) for one in found.app.describe_versions("a")]
            files.remove("a/3")
            await found.look()
            assert await found.ask("a") == "one"  # by now nothing of version 2 is there that works
            files.put("a/2", "two")
            files.loads.clear()


@run
async def test_what_failed_is_tried_again_after_a_pause(files):
    files.put("a/1", "bad")
    async with serving(files) as found:
        for _ in range(3):
            with pytest.raises(ModelError, match="it is bad"):
                await found.ask("a")
        assert files.loads == [("a", 1)]
        refusal = found.stock.offer.refusals._all["a", 1]
        refusal.again_s = 0.0
        with pytest.raises(ModelError, match="it is bad"):
            await found.ask("a")
        assert files.loads == [("a", 1)] * 2
        assert found.stock.offer.refusals._all["a", 1].pause_s == 2 * FIRST_PAUSE_S


@run
async def test_a_successor_that_failed_is_tried_again_though_timers_are_early(files):
    files.put("a/1", "one")
    async with serving(files) as found:
        await found.ask("a")
        loop: Any = asyncio.get_running_loop()
        later = loop.call_later
        loop.call_later = lambda delay, *what, **more: later(0.9 * delay, *what, **more)
        found.stock.offer.refusals._first_pause_s = 0.02
        files.put("a/2", "bad")
        await found.look()
        await reached(lambda: files.loads.count(("a", 2)) > 2)
        assert await found.ask("a") == "one"


@run
async def test_a_model_that_is_removed_is_gone(files):  # N112
    files.put("a/1", "one")
    files.put("b/1", "other")
    async with serving(files) as found:
        await found.ask("a")
        await found.ask("b")
        files.remove("a/1")
        await found.look()
        with pytest.raises(NotFound, match="there is no model 'a'"):
            await found.ask("a")
        assert set(found.app.served) == {"b"}
        assert found.stock.statistics().loaded == 1
        files.put("a/1", "again")
        await found.look()
        assert await found.ask("a") == "again"


@run
async def test_several_versions_side_by_side(files):  # N102
    for number in (1, 2, 10, 9):
        files.put(f"a/{number}", str(number))
    async with serving(files, "all") as found:
        assert await found.ask("a", "1") == "1"
        assert found.app.served == {}  # who names no version is not answered by this one
        assert await found.ask("a") == "10"
        assert await found.ask("a", "002") == "2"
        assert found.app.versions("a").weights == {"10": 1}
        for version in ("3", "x", "-1", "1/../2"):
            with pytest.raises(NotFound):
                await found.ask("a", version)
    async with serving(files, "latest:2") as found:
        assert [await found.ask("a"), await found.ask("a", "9")] == ["10", "9"]
        files.put("a/11", "11")
        await found.look()
        told = found.versions("a")
        assert {one: told[one] for one in ("11", "10", "9")} == {"11": "ready", "10": "ready", "9": "not served"}
        assert await found.ask("a") == "11"


@run
async def test_somebody_loads_and_unloads_by_hand(files):
    files.put("a/1", "one")
    files.put("a/2", "two")
    async with serving(files, "all", is_lazy=False) as found:
        await found.app.unload("a", "2")
        await found.rest()
        assert found.versions("a")["2"] == "unloaded"
        with pytest.raises(NotFound, match="version 2 of the model 'a' was unloaded by hand"):
            await found.ask("a", "2")
        await found.look()
        assert found.versions("a")["2"] == "unloaded"
        source = found.app.source
        assert source is not None
        await found.app.load("a", "2", lambda: source("a", "2"))
        assert await found.ask("a", "2") == "two"
        await reached(lambda: found.app.versions("a").weights == {"2": 1})
        with pytest.raises(NotFound):
            await found.app.load("a", "7", lambda: source("a", "7"))


@run
async def test_a_load_by_hand_that_fails_leaves_the_files_to_be_tried_again(files):
    files.put("a/1", "old")
    async with serving(files) as found:
        await found.ask("a")
        files.not_now.add("new")
        files.put("a/1", "new")
        await found.look()
        source = found.app.source
        assert source is not None
        with pytest.raises(ModelError, match="it is bad"):
            await found.app.load("a", "1", lambda: source("a", "1"))
        found.app.label("a", {"stable": "1"})  # a change of the model, which has everybody look at it
        assert found.stock.offer.refusals.keys == [("a", 1)]
        files.not_now.clear()
        found.stock.offer.refusals._all["a", 1].again_s = 0.0
        await found.look()
        assert await found.ask("a") == "new"


@run
async def test_the_versions_that_a_client_says_stay_when_others_come(files):
    for address in ("a/1", "a/2", "b/1"):
        files.put(address, address)
    async with serving(files) as found:
        await reload(found.app, [WantedModel(name="a", policy=VersionPolicy.of("1")), WantedModel(name="b")])
        assert await found.ask("a") == "a/1"
        files.put("a/3", "a/3")
        files.put("b/2", "b/2")
        await found.look()
        assert await found.ask("a") == "a/1"
        assert await found.ask("b") == "b/2"
        assert found.versions("a") == {"1": "ready", "2": "not served", "3": "not served"}
        with pytest.raises(NotFound, match="version 3 of the model 'a' exists but is not served; a client has said"):
            await found.ask("a", "3")
        files.put("a/1", "other files")
        await found.look()
        assert await found.ask("a") == "other files"


@run
async def test_a_version_that_left_for_a_later_one_as_a_client_said_comes_back_when_that_is_removed(files):
    for address in ("a/1", "a/2"):
        files.put(address, address)
    async with serving(files, "all", is_lazy=False) as found:
        await reload(found.app, [WantedModel(name="a")])
        assert set(found.app.versions("a").ready) == {"2"}
        files.put("a/3", "a/3")
        await found.look()
        assert set(found.app.versions("a").ready) == {"3"}
        for number in (3, 2):
            files.remove(f"a/{number}")
        await found.look()
        assert await found.ask("a") == "a/1"


@run
async def test_what_a_client_said_of_versions_ends_when_it_does_not_name_their_model_any_more(files):
    for address in ("a/1", "a/2", "b/1"):
        files.put(address, address)
    async with serving(files, "all", is_lazy=False) as found:
        await reload(found.app, [WantedModel(name="a", policy=VersionPolicy.of("1"))])
        assert set(found.app.ready) == {"a"}
        await reload(found.app, [WantedModel(name="b")])
        assert set(found.app.ready) == {"b"}
        await reached(lambda: found.versions("a") == {"1": "unloaded", "2": "unloaded"})


@run
async def test_what_somebody_shares_by_hand_holds_until_a_version_comes_or_goes(files):
    files.put("a/1", "one")
    files.put("a/2", "two")
    async with serving(files, "all", is_lazy=False) as found:
        found.app.share("a", {"1": 90, "2": 10})
        files.put("b/1", "other")
        await found.look()
        assert await found.ask("b") == "other"
        assert found.app.versions("a").weights == {"1": 90, "2": 10}
        files.put("a/2", "other files")
        await found.look()
        assert await found.ask("a", "2") == "other files"
        assert found.app.versions("a").weights == {"1": 90, "2": 10}
        files.put("a/3", "three")
        await found.look()
        assert found.app.versions("a").weights == {"3": 1}
        found.app.share("a", {"1": 90, "2": 10})
        files.remove("a/1")
        await found.look()
        assert found.app.versions("a").weights == {"3": 1}
        found.app.share("a", {"2": 1})
        await found.app.unload("a", "3")
        await found.look()
        assert found.app.versions("a").weights == {"2": 1}


@run
async def test_what_left_and_comes_again_is_no_longer_shared_as_somebody_said(files):
    for address in ("a/1", "a/2", "b/1"):
        files.put(address, address)
    async with serving(files, "all", max_models=2) as found:
        await found.ask("a", "1")
        await found.ask("a")
        found.app.share("a", {"1": 90, "2": 10})
        await found.app.versions("a").ready["1"].endpoint.call(b"")
        await found.ask("b")
        await found.rest()
        assert found.app.versions("a").weights == {"1": 90}
        await found.ask("a", "2")
        assert found.app.versions("a").weights == {"2": 1}


@run
async def test_what_the_repository_has_not_is_not_told_of_after_it_could_not_be_loaded(files):
    files.put("a/1", "one")
    files.put("b/1", "bad")
    files.put("b/2", "bad")
    async with serving(files, "all") as found:
        index = found.app.model_index
        await found.ask("a")
        for name, version in (("a", "7"), ("b", "7"), ("c", "1")):
            with pytest.raises(NotFound):
                await found.app.load(name, version, index.maker(name, version))
        with pytest.raises(ModelError, match="it is bad"):
            await found.app.load("b", "1", index.maker("b", "1"))
        for version in ("2", None):
            with pytest.raises(ModelError, match="it is bad"):
                await found.ask("b", version)

        async def told():
            return {(one["name"], one["version"]): one["reason"] for one in await index.index()}

        assert await told() == {("a", "1"): "", ("b", "1"): "it is bad", ("b", "2"): "it is bad"}
        files.remove("b/1")
        await found.look()
        assert await told() == {("a", "1"): "", ("b", "2"): "it is bad"}
        files.remove("b/2")
        await found.look()
        assert [one["name"] for one in found.app.describe_all()] == ["a"]


@run
async def test_what_somebody_has_swapped_in_answers_until_a_version_comes_that_was_not_there(files):
    settings: list[dict[str, Any]] = [{"is_lazy": False}, {}, {"max_models": 1}]
    for more in settings:
        for address in ("a/1", "a/2", "b/1"):
            files.put(address, address)
        async with serving(files, **more) as found:
            maker = found.app.model_index.maker
            assert await found.ask("a") == "a/2"
            await found.app.swap("a", "1", maker("a", "1"))
            assert await found.ask("a") == "a/1"
            files.put("b/1", "b/1 anew")
            await found.look()
            assert await found.ask("a") == "a/1"
            await reached(lambda: found.versions("a") == {"1": "ready", "2": "unloaded"})
            assert await found.ask("b") == "b/1 anew"  # where there is room for one, the other leaves
            await found.rest()
            assert await found.ask("a") == "a/1"
            with pytest.raises(NotFound, match="version 2 of the model 'a' was unloaded by hand"):
                await found.ask("a", "2")
            files.put("a/3", "bad")
            await found.look()
            with pytest.raises(ModelError, match="it is bad"):
                await found.ask("a", "3")
            assert await found.ask("a") == "a/1"
            files.put("a/3", "a/3")
            await found.look()
            assert await found.ask("a") == "a/3"
            files.remove("a/3")
            await found.look()
            assert await found.ask("a") == "a/1"
            await found.app.load("a", "2", maker("a", "2"))
            await reached(lambda: found.app.versions("a").weights == {"2": 1})
            assert await found.ask("a") == "a/2"


@run
async def test_what_is_swapped_in_replaces_what_was_not_in_memory_as_well(files):
    for address in ("a/1", "a/2", "a/3", "b/1"):
        files.put(address, address)
    async with serving(files, "all", max_models=1) as found:
        maker = found.app.model_index.maker
        await found.ask("a")
        await found.ask("b")
        await found.app.swap("a", "1", maker("a", "1"))
        files.put("b/1", "b/1 anew")
        await found.look()
        assert await found.ask("a") == "a/1"
        assert await found.ask("a", "2") == "a/2"
        await found.rest()
        assert await found.ask("a") == "a/1"
        await found.rest()
        await found.app.model_index.unload("a")
        await found.rest()
        await found.app.model_index.load("a")
        assert await found.ask("a") == "a/1"


@run
async def test_another_spelling_of_a_version_is_none_that_is_loaded_by_hand(files):
    files.put("a/1", "one")
    files.put("b/02", "two")
    async with serving(files) as found:
        source = found.app.source
        assert source is not None
        with pytest.raises(NotFound, match="the model 'a' has no version '01'; did you mean '1'"):
            await found.app.load("a", "01", lambda: source("a", "01"))
        with pytest.raises(NotFound, match="the model 'b' has no version '02'; did you mean '2'"):
            await found.app.load("b", "02", lambda: source("b", "02"))
        assert files.loads == []
        await found.app.load("b", "2", lambda: source("b", "2"))
        assert await found.ask("b", "2") == "two"


@run
async def test_what_was_built_as_another_version_lets_its_files_go(files):
    files.put("a/1", "one")
    gone = []
    async with serving(files) as found:
        source = found.app.source
        assert source is not None

        def other():
            served = source("a", "1")
            served.gone = lambda: gone.append("a")
            return served

        with pytest.raises(ConfigError, match="'a' version '2' was wanted, and it is 'a' version '1'"):
            await found.app.load("a", "2", other)
        assert gone == ["a"]


@run
async def test_the_repository_protocol_tells_and_does_the_same(files):
    for number in (1, 2):
        files.put(f"a/{number}", str(number))
    files.put("b/1", "bad")
    async with serving(files) as found:
        index = found.app.model_index

        async def told():
            found = await index.index()
            return {(one["name"], one["version"]): (one["state"], one["reason"]) for one in found}

        assert await told() == {
            ("a", "1"): ("UNAVAILABLE", "not among the versions that are served"),
            ("a", "2"): ("UNAVAILABLE", "loaded when it is asked for"),
            ("b", "1"): ("UNAVAILABLE", "loaded when it is asked for"),
        }
        await index.load("a")
        assert (await told())["a", "2"] == ("READY", "")
        with pytest.raises(ModelError, match="it is bad"):
            await index.load("b")
        assert (await told())["b", "1"] == ("UNAVAILABLE", "it is bad")
        await index.unload("a")
        await found.rest()
        await reached(lambda: found.versions("a")["2"] == "unloaded")
        assert (await told())["a", "2"] == ("UNAVAILABLE", "unloaded")
        for version in (None, "2"):  # whoever unloads it does not mean that the next one who asks loads it again
            with pytest.raises(NotFound, match="version 2 of the model 'a' was unloaded by hand"):
                await found.ask("a", version)
        await index.load("a")
        assert await found.ask("a") == "2"
        await index.unload("a")
        files.put("a/2", "other files")
        await found.look()
        assert await found.ask("a") == "other files"


@run
async def test_all_of_a_model_that_is_unloaded_stays_away_also_what_was_not_in_memory(files):
    for address in ("a/1", "a/2", "b/1", "c/1", "c/2"):
        files.put(address, address)
    async with serving(files, "all") as found:
        index = found.app.model_index
        await found.ask("a")
        for name in "ab":
            await index.unload(name)
        await found.rest()
        for name, version in (("a", None), ("a", "1"), ("a", "2"), ("b", None)):
            with pytest.raises(NotFound, match="was unloaded by hand"):
                await found.ask(name, version)
        assert (found.versions("a"), found.versions("b")) == ({"1": "unloaded", "2": "unloaded"}, {"1": "unloaded"})
        await index.load("a")
        assert await found.ask("a", "1") == "a/1"
        assert await found.ask("a") == "a/2"
        await index.load("b")
        assert await found.ask("b") == "b/1"
        with pytest.raises(NotFound, match="there is no model 'd'"):
            await index.unload("d")
        with pytest.raises(NotFound, match=r"no version of the model 'c' is loaded$"):
            await found.app.unload("c", "1")
        await found.ask("c", "1")
        with pytest.raises(NotFound, match="no version of the model 'c' is loaded that answers what names none"):
            found.app.find("c")


@run
async def test_models_come_and_go_while_they_are_told(files):  # all of 10,000 at once held up the loop for 0.1 s
    for number in range(300):
        files.put(f"m{number}/1", "x")
    async with serving(files) as found:
        await found.ask("m1")
        await found.ask("m2")
        each = found.app.describe_each()
        assert next(each)["name"] == "m1"
        await found.app.unload("m2", "1")
        files.remove("m7/1")
        await found.look()
        assert len(list(each)) >= 297
        turns = []
        asyncio.get_running_loop().call_soon(turns.append, "another's turn")
        assert len(await found.app.model_index.index()) == 299
        assert turns


@run
async def test_a_name_that_is_none_is_compared_with_some_of_many(files):  # 10,000 took 22 ms of the loop
    for number in range(1000):
        files.put(f"{chr(97 + number % 26)}{number}/1", "x")
    compared = []
    plain = difflib.get_close_matches
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(difflib, "get_close_matches", lambda *a, **b: compared.append(len(a[1])) or plain(*a, **b))
        async with serving(files) as found:
            with pytest.raises(NotFound, match="did you mean 'a26'"):
                await found.ask("a266")
            with pytest.raises(NotFound):
                found.app.find("nothing like that")
    assert max(compared) <= 256


@run
async def test_what_prometheus_is_told(files):
    for name in "abc":
        files.put(f"{name}/1", name)
    files.put("d/1", "bad")
    async with serving(files, max_models=2) as found:
        for name in "aabac":
            await found.ask(name)
        await found.app.find("a").endpoint.call(b"")  # past the stock, as over the fast lane
        with pytest.raises(ModelError):
            await found.ask("d")
        collector = RepositoryCollector()
        assert list(collector.collect()) == []
        collector.reading = stock_report.reading(found.stock)
        samples = {one.name: one for family in collector.collect() for one in family.samples}
        memory = {name: one.value for name, one in samples.items() if not one.labels}
        assert memory == {
            "forebay_loaded_versions": 1,
            "forebay_loaded_bytes": 1,
            "forebay_load_hits_total": 3,
            "forebay_load_misses_total": 3,
            "forebay_loads_total": 4,
            "forebay_load_failures_total": 1,
            "forebay_load_evictions_total": 2,
            "forebay_load_waiting": 0,
        }
        assert samples["forebay_repository_models"].value == 4
        assert samples["forebay_repository_models"].labels == {"repository": found.repository.place}
        assert samples["forebay_repository_looks_total"].value == 2
        assert samples["forebay_repository_looked_timestamp_seconds"].value > 1e9


@run
async def test_files_that_change_while_they_are_loaded_are_not_taken(files):
    files.put("a/1", "old")
    async with serving(files) as found:
        files.may_load.clear()
        asking = asyncio.ensure_future(found.ask("a"))
        await reached(lambda: files.loads)
        files.put("a/1", "new")
        files.may_load.set()
        with pytest.raises(Unavailable, match="has changed while it was loaded"):
            await asking
        await found.look()
        assert await found.ask("a") == "new"


@run
async def test_a_version_that_is_removed_while_it_is_loaded_is_not_told_of(files):
    files.put("cat/1", "meow")
    async with serving(files) as here:
        await here.ask("cat")
        files.may_load.clear()
        files.put("cat/2", "bad")
        for _ in range(2):
            await asyncio.to_thread(here.repository.look)
        here.stock._tend_all()
        await reached(lambda: ("cat", 2) in files.loads)
        files.remove("cat/2")
        for _ in range(2):
            await asyncio.to_thread(here.repository.look)
        here.stock._tend_all()
        assert here.versions("cat") == {"1": "ready", "2": "loading"}
        files.may_load.set()
        await here.rest()
        assert here.versions("cat") == {"1": "ready"}
        assert await here.ask("cat") == "meow"


@run
async def test_a_name_that_something_else_has(files):
    files.put("a/1", "one")
    async with serving(files) as found:
        config = EndpointConfig(name="a")
        own = Served(Endpoint(config, BatchConfig(), InlinePool(RunnerSpec("", local=lambda: Says("own")))), Contract())
        await own.endpoint.start()
        found.app.put(own)
        with pytest.raises(ConfigError, match="has the name of another one that is served"):
            await found.ask("a")


@run
async def test_what_is_loaded_by_hand_counts_though_a_load_that_waited_for_it_failed(files):
    files.put("a/1", "one")
    made = files.make

    def make(revision, folder):
        served = made(revision, folder)
        if len(files.loads) > 1:
            raise ModelError("once only")
        return served

    files.make = make
    files.may_load.clear()
    async with serving(files) as found:
        source = found.app.source
        assert source is not None
        by_hand = asyncio.create_task(found.app.load("a", "1", lambda: source("a", "1")))
        await reached(lambda: files.loads)
        asked = asyncio.create_task(found.ask("a", "1"))
        await reached(lambda: found.stock._loading)
        files.may_load.set()
        await by_hand
        assert await asked == "one"
        assert len(files.loads) == 2
        assert found.stock.statistics().loaded == 1
        assert found.stock.offer.refusals.keys == []


@run
async def test_what_was_written_just_now_is_waited_for_by_who_loads_it_by_hand(files):
    files.put("a/1", "one")
    async with serving(files) as found:
        files.put("b/3", "three")
        await found.app.model_index.load("b")
        assert await found.ask("b") == "three"
        files.put("b/4", "four")
        await found.stock.wait_for("b", "4")
        assert found.stock.offer.there("b").keys() == {3, 4}
        looks = found.repository.looks
        await found.stock.wait_for("c", "1")  # which nobody has written: one look
        assert found.repository.looks == looks + 1
        await found.stock.wait_for("b", "3")
        await found.stock.wait_for("b", "x")
        assert found.repository.looks == looks + 1
        with pytest.raises(NotFound, match="no repository has a version '1' of a model 'c'"):
            await found.app.model_index.load("c")


@run
async def test_of_two_clients_that_say_what_is_loaded_at_the_same_time_one_has_the_last_word(files):
    for address in ("a/1", "b/1", "c/1"):
        files.put(address, address)
    async with serving(files) as found:
        said = [[WantedModel(name="a"), WantedModel(name="c")], [WantedModel(name="b"), WantedModel(name="c")]]
        for _ in range(5):
            await asyncio.gather(*(reload(found.app, one) for one in said))
            assert sorted(found.app.ready) in (["a", "c"], ["b", "c"])
            said.reverse()


@run
async def test_a_model_that_cannot_be_loaded_keeps_none_of_those_that_a_client_names_behind_it_away(files):
    for name, text in (("a", "a"), ("b", "bad"), ("c", "c")):
        files.put(f"{name}/1", text)
    async with serving(files) as found:
        await found.ask("c")
        with pytest.raises(ModelError, match="it is bad"):
            await reload(found.app, [WantedModel(name="b"), WantedModel(name="a")])
        assert sorted(found.app.ready) == ["a"]


@run
async def test_a_version_that_is_leaving_counts_until_it_is_gone(files):  # F98
    files.put("a/1", "one")
    files.put("b/1", "b")
    files.put("c/1", "c")
    async with serving(files, max_models=2) as found:
        await found.ask("b")
        await found.ask("a")
        answer = asyncio.Event()
        running = asyncio.ensure_future(found.ask("a", None, answer))
        await reached(lambda: found.app.find("a").endpoint.in_flight)
        files.put("a/2", "two")
        for _ in range(2):
            await asyncio.to_thread(found.repository.look)
        found.stock._tend_all()
        await reached(lambda: "2" in found.app.versions("a").weights)
        assert found.versions("b") == {"1": "available"}
        assert found.stock.statistics().loaded == 2  # version 1 answers a request yet
        busy = asyncio.ensure_future(found.ask("a", None, answer))
        await reached(lambda: found.app.find("a").endpoint.in_flight)
        waiting = asyncio.ensure_future(found.ask("c"))
        await reached(lambda: found.stock._loading)
        await asyncio.sleep(0)
        assert ("c", 1) not in files.loads
        answer.set()
        assert await running == "one"
        assert await busy == "two"
        assert await waiting == "c"
        await found.rest()
        await reached(lambda: len(found.stock._there) == found.stock.statistics().loaded == 2)


@run
async def test_what_leaves_for_a_load_is_gone_before_it_begins(files):  # F98
    for name in "abcd":
        files.put(f"{name}/1", name)
    async with serving(files, max_models=1) as found:
        stock: Any = found.stock
        make, there = stock._made, []

        def noted(*arguments):
            there.append(len(stock._there))
            return make(*arguments)

        stock._made = noted
        for name in "abcdabcd":
            assert await found.ask(name) == name
        assert there == [0] * 8


@run
async def test_what_comes_back_while_it_leaves_can_leave_again(files):  # F98
    files.put("a/1", "a")
    files.put("b/1", "b")
    async with serving(files, max_models=1) as found:
        await found.ask("a")
        answer = asyncio.Event()
        running = asyncio.ensure_future(found.app.find("a").endpoint.call(answer))
        await reached(lambda: found.app.find("a").endpoint.in_flight)
        await found.app.unload("a", "1")
        await found.app.load("a", "1", lambda: found.stock.find("a", "1"))
        answer.set()
        assert await running == "a"
        await reached(lambda: len(found.stock._there) == 1)
        assert await found.ask("b") == "b"
        assert not found.stock._held


@run
async def test_what_the_policy_leaves_out_is_not_loaded_by_hand_only_to_leave(files):  # F104
    for number in (1, 2):
        files.put(f"a/{number}", str(number))
    async with serving(files) as found:
        offer = found.stock.offer
        offer.require_choice("a", "2")
        offer.require_choice("a", "7")  # who loads it says that there is none
        with pytest.raises(NotFound, match="version 1 of the model 'a' exists but is not served; see --versions"):
            offer.require_choice("a", "1")
        source = found.app.source
        assert source is not None
        await found.app.swap("a", "1", lambda: source("a", "1"))
        offer.require_choice("a", "1")
        offer.require_choice("a", "2")


@run
async def test_a_place_without_any_model_is_not_ready_and_says_so(files):  # F104
    async with serving(files) as found:
        assert found.app.problems() == [f"no model is served yet: {files.folder} has none, if it is called so"]
        files.put("a/1", "one")
        await found.look()
        assert found.app.problems() == []
        files.remove("a/1")
        await found.look()
        assert found.app.problems() == []  # it was there


@run
async def test_a_load_waits_for_the_room_of_one_that_is_not_over_yet(files):  # F98
    for name in "ab":
        files.put(f"{name}/1", name)
    async with serving(files, max_models=1) as found:
        files.may_load.clear()
        first = asyncio.ensure_future(found.ask("a"))
        await reached(lambda: files.loads)
        second = asyncio.ensure_future(found.ask("b"))
        await reached(lambda: len(found.stock._loading) == 2)
        files.may_load.set()
        assert await first == "a"
        assert await second == "b"
