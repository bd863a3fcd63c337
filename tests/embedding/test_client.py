# SPDX-License-Identifier: Apache-2.0
"""What `forebay.testing` offers to whoever tests a model."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import msgspec
import pydantic
import pytest
from tests.pools import runners
from tests.waiting import PATIENCE_S

import forebay
from forebay.errors import ConfigError, ModelError, NotFound
from forebay.testing import CallFailed, ManualPool, check_model, check_pool, client
from forebay.workers.pools.inline import InlinePool
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import RunnerSpec


class Shout(forebay.Model):
    """Has all the hooks."""

    batches: list[int]

    def load(self):
        self.batches = []

    def preprocess(self, sample: str) -> str:
        if not sample:
            raise forebay.ValidationError("the text is empty")
        return sample.strip()

    def predict(self, batch):
        self.batches.append(len(batch))
        if "boom" in batch:
            raise KeyError("the model has a bug")
        return [text.upper() for text in batch]

    def postprocess(self, result) -> str:
        return result + "!"


class Count(forebay.Model):
    def predict(self, batch: list[int]) -> Iterator[list[int | None]]:
        for number in range(max(batch)):
            yield [number if number < top else None for top in batch]
        if 13 in batch:
            raise RuntimeError("no luck")


class Flip(forebay.Model):
    """Takes bytes."""

    def predict(self, batch: list[bytes]) -> list[bytes]:
        return [body[::-1] for body in batch]


class Point(msgspec.Struct):
    x: float


class Double(forebay.Model):
    def predict(self, batch: list[Point]) -> list[Point]:
        return [Point(2 * point.x) for point in batch]


def test_hooks_validation_and_encoding_run_as_served():  # F58
    with client(Shout) as shout:
        assert shout.call("  hello ") == "HELLO!"
        refused = shout.ask(3)
        assert (refused.status, refused.error["detail"]) == (422, {"path": "$"})
        with pytest.raises(CallFailed, match="422 invalid_argument: the text is empty") as failed:
            shout.call("")
        assert (failed.value.status, failed.value.code, failed.value.message) == (
            422,
            "invalid_argument",
            "the text is empty",
        )


def test_a_failure_of_the_model_brings_its_traceback():  # F58
    with client(Shout) as shout:
        with pytest.raises(CallFailed, match="500 internal: the model failed") as failed:
            shout.call("boom")
        assert "KeyError: 'the model has a bug'" in "".join(failed.value.__notes__)
        assert "the model has a bug" not in failed.value.answer.text
    assert logging.getLogger("forebay.requests").handlers == []


def test_samples_that_are_sent_at_once_meet_in_batches():  # F58
    with client(Shout, max_batch_size=8) as shout:
        assert shout.call_all(["a"] * 24) == ["A!"] * 24
        about = shout.describe()["batching"]
        assert (about["batches"], about["max_batch_size"]) == (3, 8)
        answers = shout.ask_all(["a", "", "b"])
        assert [answer.status for answer in answers] == [200, 422, 200]


def test_the_async_client_runs_on_the_loop_of_the_test():  # F58
    async def test():
        async with client(Shout, Count) as models:
            assert await models.call("a", model="shout") == "A!"
            assert await models.call_all(["a", "b"], model="shout") == ["A!", "B!"]
            assert [part async for part in models.stream(3, model="count")] == [0, 1, 2]
            return threading.active_count()

    asyncio.run(test())


def test_parts_of_a_stream_come_one_by_one():  # F58
    with client(Count) as count:
        assert list(count.stream(3)) == [0, 1, 2]
        assert count.call(4) == [0, 1, 2, 3]
        parts = count.stream(13)
        with pytest.raises(CallFailed, match="internal: the model failed"):
            list(parts)
        with pytest.raises(CallFailed, match="422"):
            list(count.stream("x"))


def test_who_stops_listening_has_gone_away(eventually):  # F58
    with client(Count) as count:
        for part in count.stream(1_000_000_000):
            assert part == 0
            break
        eventually(lambda: count.describe()["in_flight"] == 0)
        eventually(lambda: (workers := count.describe()["workers"])["idle"] == workers["slots"])
        assert count.call(2) == [0, 1]


def test_an_answer_that_is_no_stream_is_not_read_as_an_empty_one():
    with client(Shout) as shout:
        with pytest.raises(RuntimeError, match="expected a stream, got application/json"):
            list(shout.stream("hey\n\nyou"))
        with pytest.raises(CallFailed, match="the text is empty"):
            list(shout.stream(""))


@pytest.mark.parametrize("length", [3, 1_000_000_000])
def test_a_stream_that_is_open_at_the_end_of_the_with_is_left(length, caplog):
    with client(Count) as count:
        parts = count.stream(length)
        assert next(parts) == 0
    with pytest.raises(RuntimeError, match="within its `with`"):
        next(parts)

    async def test():
        async with client(Count) as count:
            parts = count.stream(length)
            assert await anext(parts) == 0
        with pytest.raises(RuntimeError, match="within the `with`"):
            await anext(parts)

    asyncio.run(test())
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_who_reads_a_stream_while_another_thread_leaves_the_with_hears_so():
    told: list[BaseException] = []
    begun = threading.Event()

    def read() -> None:
        try:
            for _ in count.stream(1_000_000_000):
                begun.set()
        except RuntimeError as error:
            told.append(error)

    with client(Count) as count:
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert begun.wait(PATIENCE_S)
    reader.join(PATIENCE_S)
    assert "it is closed" in str(told[0])


def test_bytes_are_sent_as_they_are_and_structs_as_json():  # F58
    with client(Flip) as flip:
        assert flip.call(b"\x00ab") == b"ba\x00"
    with client(Double) as double:
        assert double.call(Point(2.0)) == {"x": 4.0}
        assert double.request("POST", "/", b'{"x": 1}').json() == {"x": 2.0}


class Letter(msgspec.Struct):
    scan: forebay.File


class Weigh(forebay.Model):
    def predict(self, batch: list[Letter]) -> list[int]:
        return [letter.scan.size for letter in batch]


class Posted(pydantic.BaseModel):
    scan: forebay.File


class Forward(forebay.Model):
    def predict(self, batch: list[Posted]) -> list[Posted]:
        return batch


def test_files_of_a_sample_are_sent_as_clients_send_them():
    with client(Forward) as served:
        assert served.call(Posted(scan=forebay.File(b"abc"))) == {"scan": "YWJj"}
    with client(Weigh) as served:
        assert served.call(Letter(forebay.File(b"abc"))) == 3
    check_model(Weigh, [Letter(forebay.File(b"abc")), {"scan": b"a"}])


def test_several_models_are_told_apart():
    with client(Shout, Flip) as models:
        assert models.call("a", model="shout") == "A!"
        with pytest.raises(forebay.InvalidRequest, match="shout, flip"):
            models.call("a")
        with pytest.raises(NotFound, match="did you mean 'shout'"):
            models.call("a", model="shuot")


def test_keys_are_asked_for_as_served():
    with client(Shout, api_keys=["secret"]) as shout:
        assert shout.ask("a").status == 401
        assert shout.ask("a", headers={"X-API-Key": "secret"}).value == "A!"


def test_a_path_is_decoded_and_head_has_no_body():
    with client(Shout) as shout:
        assert shout.request("POST", "/models/sh%6Fut", b'"a"').json() == "A!"
        answer = shout.request("HEAD", "/models/shout")
        assert (answer.status, answer.body) == (200, b"")


def test_a_model_that_does_not_load_says_so_at_the_with():
    class Broken(forebay.Model):
        def load(self):
            raise OSError("no such weights")

        def predict(self, batch):
            return batch

    with pytest.raises(ModelError, match="no such weights"), client(Broken):
        pass
    threads = [thread.name for thread in threading.enumerate()]
    assert "forebay-testing" not in threads


@pytest.mark.parametrize(
    "targets, settings, told",
    [
        ((), {}, "nothing to serve"),
        ((Shout, 3), {}, r"^forebay.testing.client\(\): expected a forebay.Model class.*, got '3' \(int\)"),
        ((Shout(),), {}, "^forebay.testing.client.*pass the class Shout"),  # forebay.asgi was told
        (("one.py", "two.py"), {}, "takes one path"),
        (("nowhere.py",), {}, "there is no file"),
        ((Shout,), {"wokers": 2}, "unknown setting wokers; did you mean workers?"),
        ((Shout,), {"workers": 0}, "workers=.*expected >= 1, got 0; no workers can dial in here"),
        ((Shout,), {"workers": "two"}, r"workers=.*expected a whole number from 0 to 1024, a range .* got 'two'"),
        ((Shout,), {"max_wait_ms": float("nan")}, "max_wait_ms=.*expected milliseconds >= 0 or None, got nan"),
        ((Shout,), {"worker_kind": "fork"}, "worker_kind=.*expected 'inline', 'process' or 'thread', got 'fork'"),
        ((Shout,), {"port": 1}, "unknown setting port; set it in the server"),
        ((Shout, Shout), {}, "two models are named 'shout'"),
    ],
)
def test_a_wrong_target_or_setting_is_one_sentence(targets, settings, told):
    with pytest.raises(ConfigError, match=told):
        client(*targets, **settings)


def test_a_local_class_cannot_run_in_processes_and_is_told_so():
    class Local(Shout):
        pass

    with pytest.raises(ConfigError, match="worker_kind='thread'"):
        client(Local, worker_kind="process")


def test_a_closed_client_says_so():
    with client(Shout) as shout:
        pass
    with pytest.raises(RuntimeError, match="within its `with`"):
        shout.call("a")


# ---------------------------------------------------------------------------------------------------------------------
# Contracts


def test_a_model_that_keeps_its_promises_passes():
    check_model(Shout, ["a", "b", " c "], bad=["", 3, "boom"][:2])
    check_model(Double, [Point(1.5), {"x": 3}], bad=[{"x": "1"}, {}])
    check_model(Count, [3, 5])
    check_model(Flip, [b"ab", b"c"])


class Mean(forebay.Model):
    """Lets its samples depend on each other."""

    def predict(self, batch: list[float]) -> list[float]:
        return [number - sum(batch) / len(batch) for number in batch]


class Rigid(forebay.Model):
    """Lets one sample fail the others."""

    def predict(self, batch: list[float]) -> list[float]:
        return [1 / number for number in batch]


@pytest.mark.parametrize(
    "model, samples, bad, told",
    [
        (Mean, [1, 2], [], r"samples\[0\], in company: -0.5; alone it is 0.0"),
        (Rigid, [1, 2], [0], r"samples\[0\], beside bad\[0\]: 500 .*; alone it is answered"),
        (Rigid, [1, 0], [], r"samples\[1\] is not answered: 500"),
        (Rigid, [1], [2], r"bad\[0\] is answered with 0.5"),
    ],
)
def test_a_model_that_breaks_a_promise_is_named_with_it(model, samples, bad, told):
    with pytest.raises(AssertionError, match=told):
        check_model(model, samples, bad=bad)


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_the_pools_keep_their_contract(kind):
    spec = RunnerSpec("tests.pools.runners:Told", {})

    def make():
        if kind == "process":
            from pathlib import Path

            return ProcessPool(spec, path=[str(Path(__file__).parents[2])])
        return InlinePool(spec) if kind == "inline" else ThreadPool(spec, workers=2)

    assert runners.Told
    asyncio.run(check_pool(make))


def test_a_pool_that_breaks_its_contract_is_told_of():
    class Forgetful(ManualPool):
        def submit(self, batch, done):
            done(batch, [entry.body for entry in batch.entries][:1])

    with pytest.raises(AssertionError, match="each entry gets its own outcome"):
        asyncio.run(check_pool(Forgetful))
