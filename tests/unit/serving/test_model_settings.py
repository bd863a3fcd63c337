# SPDX-License-Identifier: Apache-2.0
"""What a model may say about keys, padding, isolation and objectives, and what is said of one that is wrong."""

from __future__ import annotations

import asyncio
import operator

import msgspec
import pytest

from forebay import Pad
from forebay.errors import ConfigError
from forebay.server.config import Overrides
from forebay.serving.models.model import Model, settings_of
from forebay.serving.models.model_runner import runner_for
from forebay.surfaces.native.model_endpoint import serve_model
from forebay.types.settings import declared
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.runner import WorkerContext


def model(**attributes):
    return type("MyModel", (Model,), {"predict": lambda self, batch: batch, **attributes})


class Sample(msgspec.Struct):
    ids: list[int]


class Tokens(Model):
    pad = Pad({"ids": ("length",)}, buckets={"length": [4, 8]})

    def predict(self, batch: list[Sample]) -> list[int]:
        return [0 for _ in batch]


async def coroutine(sample):
    return sample


def generator(self, batch):
    yield batch


@pytest.mark.parametrize(
    "key_of",
    [len, operator.itemgetter("length"), staticmethod(lambda sample: 1), classmethod(lambda cls, sample: 1)],
)
def test_a_key_is_any_function_of_one_sample(key_of):
    made = settings_of(model(batch_key=key_of)).batch_key
    assert made is not None
    assert made({"length": 1}) == 1


def test_a_plain_function_in_the_class_is_taken_as_well():
    class Plain(Model):
        def batch_key(sample):  # pyright: ignore[reportSelfClsParameterName]
            return sample

        def predict(self, batch):
            return batch

    made = settings_of(Plain).batch_key
    assert made is not None
    assert made(3) == 3


def test_the_bucket_is_the_key_where_there_is_no_other():
    made = settings_of(Tokens).batch_key
    assert made is not None
    assert made(Sample(ids=[1, 2, 3, 4, 5])) == (8,)
    assert settings_of(model(pad=Pad(("length",)))).batch_key is None


@pytest.mark.parametrize(
    "attributes, told",
    [
        ({"batch_key": 5}, r"MyModel\.batch_key: expected a function of one sample, got 5"),
        ({"batch_key": coroutine}, r"MyModel\.batch_key is a coroutine function"),
        (
            {"batch_key": lambda self, sample: 1},
            r"MyModel\.batch_key\(self, sample\) cannot be called with one sample.*`@staticmethod`",
        ),
        ({"pad": {"ids": ("length",)}}, r"MyModel\.pad: expected a forebay\.Pad or None, got "),
        ({"pad": Pad(("length",)), "predict": generator}, "MyModel has pad and its predict is a generator"),
        ({"isolate_errors": "yes"}, r"MyModel\.isolate_errors: expected True or False, got 'yes'"),
        (
            {"isolate_errors": True, "predict": generator},
            r"MyModel\.isolate_errors is set and its predict is a generator",
        ),
        ({"single_flight": "al"}, r"MyModel\.single_flight: expected 'all', 'off' or 'tenant', got 'al'"),
        (
            {"single_flight": "all", "predict": generator},
            r"MyModel: single_flight is 'all' and its predict streams, so equal requests cannot share",
        ),
        (
            {"single_flight": "tenant", "predict": lambda self, batch, context: batch},
            r"MyModel: single_flight is 'tenant' and its predict takes the context of each request",
        ),
        ({"policy": "atuo"}, r"MyModel\.policy: expected 'auto' or None, got 'atuo'; did you mean 'auto'\?"),
        ({"policy": True}, r"MyModel\.policy: expected 'auto' or None, got True"),
        ({"latency_objective_ms": 0}, r"MyModel\.latency_objective_ms: expected milliseconds > 0 or None, got 0"),
        ({"latency_objective_ms": "50"}, r"MyModel\.latency_objective_ms: expected milliseconds > 0 or None, got '50'"),
        ({"latency_objective_ms": True}, r"MyModel\.latency_objective_ms: expected milliseconds > 0 or None, got True"),
        (
            {"latency_objective_ms": float("inf")},
            r"MyModel\.latency_objective_ms: expected milliseconds > 0 or None, got inf",
        ),
        ({"policy": "auto"}, "MyModel has the policy 'auto' and no objective; set latency_objective_ms"),
        ({"latency_objective_ms": 50}, "MyModel has a latency objective that nothing keeps to; set policy to 'auto'"),
        (
            {"policy": "auto", "latency_objective_ms": 50, "max_wait_ms": 5},
            "MyModel has the policy 'auto', which learns how long to wait; leave out max_wait_ms",
        ),
    ],
)
def test_a_wrong_setting_says_what_is_allowed(attributes, told):
    with pytest.raises(ConfigError, match=told):
        serve_model(model(**attributes), Overrides())


def test_a_field_to_pad_that_samples_do_not_have_is_told():
    wrong = type("Wrong", (Tokens,), {"pad": Pad({"idz": ("length",)})})
    with pytest.raises(
        ConfigError, match=r"Wrong\.pad pads the field 'idz', samples of the type `Sample`.*mean 'ids'\?"
    ):
        serve_model(wrong, Overrides())


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_how_long_a_worker_may_hang_reaches_the_pool(kind):
    pool = serve_model(Tokens, Overrides(worker_kind=kind, stuck_s=2.5)).endpoint.pool
    assert vars(pool)["_stuck_s"] == 2.5


def test_an_objective_reaches_the_queue():
    auto = model(policy="auto", latency_objective_ms=50)
    assert serve_model(auto, Overrides()).endpoint.batching.objective_s == 0.05
    assert serve_model(model(), Overrides()).endpoint.batching.objective_s is None


def test_the_command_line_goes_before_the_class():
    waits = model(max_wait_ms=5, latency_objective_ms=50)
    batching = serve_model(waits, Overrides(policy="auto", latency_objective_ms=20)).endpoint.batching
    assert (batching.objective_s, batching.max_wait_s, batching.idle) == (0.02, 0.0, "gather")
    with pytest.raises(ConfigError, match="leave out max_wait_ms"):
        serve_model(waits, Overrides(policy="auto", max_wait_ms=5))


def test_isolation_reaches_the_pool():
    def isolates(made, overrides=Overrides()):  # noqa: B008 - a value
        pool = serve_model(made, overrides).endpoint.pool
        assert isinstance(pool, ProcessPool)
        return pool._isolates

    assert not isolates(model())
    assert isolates(model(isolate_errors=True))
    assert isolates(model(), Overrides(isolate_errors=True))
    with pytest.raises(ConfigError, match=r"MyModel streams.*leave out --isolate-errors"):
        isolates(model(predict=generator), Overrides(isolate_errors=True))


@pytest.mark.parametrize("name", [*declared(Model), "batch_key"])
def test_a_setting_on_a_model_instead_of_its_class_is_warned_of(name, caplog):
    def load(self):
        setattr(self, name, object())

    runner_for(model(load=load)).open(WorkerContext())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"MyModel sets `self.{name}`" in record.getMessage()
    assert "body of the class" in record.getMessage()


def test_so_is_one_of_a_model_that_loads_on_a_loop(caplog):
    class Slow(Model):
        def __init__(self):
            self.max_batch_size = 4  # pyright: ignore[reportAttributeAccessIssue] - which says so, too

        async def load(self):
            self.max_wait_ms = 4  # pyright: ignore[reportAttributeAccessIssue]

        async def predict(self, batch):
            return batch

    asyncio.run(runner_for(Slow).open_async(WorkerContext()))  # pyright: ignore[reportAttributeAccessIssue]
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "Slow sets `self.max_batch_size`" in said
    assert "Slow sets `self.max_wait_ms`" in said


def test_what_a_model_keeps_otherwise_is_not(caplog):
    class Kept(Model):
        max_batch_size = 4

        def load(self):
            self.device = "cuda:0"  # told to the model, not by it
            self.weights = self.max_batch_size
            self.max_batch_size = self.max_batch_size  # pyright: ignore[reportAttributeAccessIssue]

        def predict(self, batch):
            return batch

    runner_for(Kept).open(WorkerContext())
    runner_for(model(__init__=lambda self: setattr(self, "max_queue", 1))).open(WorkerContext(index=1))
    assert not caplog.records  # the first of several workers says it for all
