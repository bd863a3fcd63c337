# SPDX-License-Identifier: Apache-2.0
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
"""User code that no worker runs: scripts, references, drawn functions, annotations, schemas, values that are compared.

Whatever it raises becomes an error of ours with a text that can be written, or is left aside where it does not matter.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
import threading
import types
from concurrent.futures import Future
from typing import Any

import pydantic
import pytest
from starlette.exceptions import HTTPException
from tests.graph.runners import Each
from tests.graph.test_run import graph as graph_spec
from tests.graph.test_run import node as node_spec
from tests.waiting import PATIENCE_S

import forebay
from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError, ForebayError
from forebay.graph.composition.compose import compose
from forebay.graph.composition.node import node
from forebay.graph.composition.node_signature import signature_of_function
from forebay.graph.pool import GraphPool, Node
from forebay.observe import spans
from forebay.observe.logs import log
from forebay.observe.traces.timeline import Timeline
from forebay.runtimes.model_file import ModelFile
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.models.annotations import io_types
from forebay.serving.models.schema import WireType
from forebay.surfaces.nucleus import runner as nucleus_runner
from forebay.surfaces.nucleus.logs import LineFormatter
from forebay.surfaces.pipeline.dag import service as pipeline_service
from forebay.surfaces.pipeline.fronts import schema as pipeline_schema
from forebay.surfaces.pipeline.ops import merge
from forebay.surfaces.pipeline.predictors import LocalConf
from forebay.surfaces.pipeline.predictors.client_watching import ModelWatch
from forebay.surfaces.pipeline.predictors.function import FunctionClient
from forebay.surfaces.pipeline.predictors.model_processes import ModelHost
from forebay.surfaces.pipeline.script import Script, capture
from forebay.surfaces.ventu import openapi
from forebay.surfaces.ventu.schema import Schema
from forebay.types.batch import Noted
from forebay.types.failures import failure_of
from forebay.types.server_state import here
from forebay.workers.pools.inline import InlinePool
from forebay.workers.runner import RunnerSpec


class Rude(BaseException):
    """No `except Exception` sees it."""


class Mute(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise Rude


class Posing(ForebayError):
    """Looks like one of ours, and has neither message nor detail."""

    def __init__(self) -> None:
        pass


WAYS = {
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "cancelled": asyncio.CancelledError,
    "rude": Rude,
    "mute": Mute,
    "posing": Posing,
    "surrogate": lambda: ValueError("\udcff"),
}


@pytest.fixture(params=WAYS)
def boom(request):
    """Raises in one of the ways, under a name that files may import."""

    def boom(*_: Any, **__: Any) -> Any:
        error = WAYS[request.param]()
        raise error

    sys.modules["forebay_test_boom"] = module = types.ModuleType("forebay_test_boom")
    module.boom = boom
    yield boom
    del sys.modules["forebay_test_boom"]


def elsewhere(function: Any, *arguments: Any) -> Any:
    """Call it in another thread, where no Ctrl-C is a real one; returns what it returned or raises what it raised."""
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(function(*arguments))
        except Exception as error:
            found.set_exception(error)
        except BaseException as error:
            found.set_exception(AssertionError(f"{type(error).__name__} came out"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_S)
    return found.result(0)


def refused(kind: type[ForebayError], function: Any, *arguments: Any) -> ForebayError:
    """Expect an error of ours that every protocol can write as it is."""
    with pytest.raises(ForebayError) as caught:
        elsewhere(function, *arguments)
    error = caught.value
    assert isinstance(error, kind)
    assert error.message
    assert failure_of(error).error is error
    return error


@node
def plain(x: int) -> int:
    return x


def test_a_function_that_draws_a_graph(boom):
    def drawn(x: int) -> Any:
        return boom(plain(x))

    refused(ForebayError, lambda: compose(drawn).graph)


def test_annotations_of_a_node(boom):
    def annotated(x: Any) -> int:
        return x

    annotated.__annotations__["x"] = "boom()"
    annotated.__globals__["boom"] = boom
    signature = elsewhere(lambda: signature_of_function(annotated, batched=False))
    assert len(signature.warnings) == 1
    signature.warnings[0].encode()


@pytest.mark.parametrize("what", ["x", "return"])
def test_annotations_of_a_model(boom, what):
    class Annotated(forebay.Model):
        def predict(self, x: Any) -> Any:
            return x

    Annotated.predict.__annotations__[what] = "boom()"
    Annotated.predict.__globals__["boom"] = boom
    refused(ConfigError, io_types, Annotated)


def test_a_class_that_says_how_pydantic_reads_it(boom):
    class Own:
        __get_pydantic_core_schema__ = classmethod(boom)

    refused(ConfigError, WireType, Own, "input")


class Described(pydantic.BaseModel):
    """Its description raises."""

    x: int = 0
    how: Any = None

    @classmethod
    def __get_pydantic_json_schema__(cls, *_: Any) -> Any:
        return sys.modules["forebay_test_boom"].boom()


def test_a_class_that_says_how_it_is_described(boom):
    assert elsewhere(lambda: WireType(Described, "input").json_schema("#/{name}")) == ({}, {})


def test_a_schema_of_ventu_that_says_how_it_is_described(boom):
    schema = Schema(Described)
    about: Any = {"title": "t", "version": "1", "summary": "s", "media": "application/json"}
    document = json.loads(elsewhere(lambda: openapi.document(**about, request=schema, response=schema)))
    assert document["components"]["schemas"]["Described"] == {"type": "object"}


@pytest.fixture
def as_before(monkeypatch):
    """A script takes the place of `__main__`."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    yield
    for name in [name for name in sys.modules if name.startswith("paddle_serving")]:
        del sys.modules[name]


def test_a_script(boom, as_before, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import forebay_test_boom\nforebay_test_boom.boom()\n")
    refused(ForebayError, capture, Script(str(path)))


def test_an_import_error_of_a_script_that_says_nothing(as_before, tmp_path):
    path = tmp_path / "script.py"
    text = "class Own(ImportError):\n    name = property(lambda self: 1 / 0)\n    __str__ = lambda self: 1 / 0\n"
    path.write_text(f"{text}raise Own\n")
    refused(ForebayError, capture, Script(str(path)))


def test_a_reference_that_is_imported(boom, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raises_at_import.py").write_text("import forebay_test_boom\nforebay_test_boom.boom()\n")
    refused(ForebayError, FunctionClient, "raises_at_import:name", ())


def test_a_reference_that_is_constructed(boom):
    sys.modules["forebay_test_boom"].Own = type("Own", (), {"__init__": boom})
    refused(ForebayError, FunctionClient, "forebay_test_boom:Own", ())


def test_a_reference_that_is_called(boom):
    client = FunctionClient("forebay_test_boom:boom", ())
    refused(ForebayError, client.predict, {"x": 1})


def test_a_reference_that_returns_a_coroutine(monkeypatch):
    async def never(_: Any) -> Any:
        await asyncio.Event().wait()

    made = []
    monkeypatch.setitem(
        sys.modules, "forebay_test_never", types.SimpleNamespace(model=lambda x: made.append(never(x)) or made[-1])
    )
    error = refused(ForebayError, FunctionClient("forebay_test_never:model", ()).predict, {"x": 1})
    assert "coroutine" in error.message
    assert inspect.getcoroutinestate(made[0]) == inspect.CORO_CLOSED


def test_a_library_that_runs_a_model(boom):
    runtime: Any = types.SimpleNamespace(run=boom, is_shared=False)
    refused(ForebayError, ModelFile("m", runtime).run, [], [], 0)


@pytest.mark.parametrize("line", ["raise SystemExit(0)", "raise ValueError('\\udcff')", "raise Rude"])
def test_a_model_in_a_process_of_its_own_says_why_it_was_not_loaded(line, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raises_there.py").write_text(f"class Rude(BaseException): pass\n{line}\n")
    host = ModelHost(LocalConf(model_config="raises_there:name"), None)
    error = refused(ForebayError, host.start)
    assert line.removeprefix("raise ").partition("(")[0] in error.message


def test_a_model_whose_files_change(boom, tmp_path, caplog):
    model: Any = types.SimpleNamespace(close=lambda: None, different=lambda _: None)
    loads = [boom, lambda: model]

    def load() -> Any:
        return loads.pop()()

    (tmp_path / "model").write_text("one")
    watch = ModelWatch("m", tmp_path, 60.0)
    client = watch.client(load)
    try:
        (tmp_path / "model").write_text("another")
        with caplog.at_level(logging.WARNING, "forebay.pipeline"):
            elsewhere(watch.look)
            elsewhere(watch.look)
        assert "is rejected" in caplog.text
    finally:
        client.close()


def test_a_schema_module(boom, tmp_path):
    (tmp_path / "raises_pb2.py").write_text("import forebay_test_boom\nforebay_test_boom.boom()\n")
    refused(ConfigError, pipeline_schema.load, "raises_pb2.py", tmp_path)


def test_values_of_samples_that_cannot_be_compared(boom):
    odd = type("Odd", (), {"__eq__": boom, "__hash__": None})
    groups = elsewhere(lambda: merge.grouped([{"x": odd()}, {"x": odd()}]))
    assert [group.members for group in groups] == [[0], [1]]


def test_a_refusal_of_nucleus_that_cannot_be_written(boom):
    error = HTTPException(400)
    error.detail = type("Detail", (), {"__str__": boom})()
    assert elsewhere(nucleus_runner._failed, error)[0] == 500


def test_what_a_log_of_nucleus_is_given(boom):
    odd = type("Odd", (), {"__str__": boom, "__repr__": boom})()
    record = logging.LogRecord("n", logging.INFO, __file__, 1, "said %s", (odd,), None)
    record.odd = odd
    elsewhere(LineFormatter().format, record).encode()


@pytest.mark.parametrize("spoken", ["span", "batch"])
def test_listeners(boom, spoken, caplog):
    def tell() -> None:
        if spoken == "span":
            with spans.listening(boom), spans.span("step"):
                pass
        else:
            with here(Timeline).listening(boom):
                endpoint: Any = types.SimpleNamespace(waiting=0, in_flight=0)
                batch: Any = types.SimpleNamespace(entries=[], model_s=0.0)
                here(Timeline).end(endpoint, batch, Noted(taken=0.0), 1.0)

    elsewhere(tell)
    assert "a listener to" in caplog.text


@pytest.mark.parametrize("formatter", [log.TextFormatter, log.JsonFormatter, LineFormatter])
def test_errors_that_are_logged(boom, formatter):
    error = type("Odd", (ValueError,), {"__notes__": property(boom)})("\udcff")
    record = logging.LogRecord("n", logging.ERROR, __file__, 1, "failed", (), (type(error), error, None))
    line = elsewhere(formatter().format, record)
    assert "Odd" in line
    line.encode()


def test_the_size_of_a_result_of_a_pipeline(boom):
    assert elsewhere(pipeline_service._size_of, type("Odd", (), {"nbytes": property(boom)})()) == 0


@pytest.mark.anyio
@pytest.mark.parametrize("boom", [way for way in WAYS if way != "interrupt"], indirect=True)  # here it would be real
async def test_what_reads_the_requests_of_a_graph(boom):
    spec = graph_spec(node_spec("a", "x"))
    inner = Endpoint(
        EndpointConfig(name="a"), BatchConfig(), InlinePool(RunnerSpec(factory="", local=lambda: Each(lambda x: x)))
    )
    pool = GraphPool(spec, {"a": Node(endpoint=inner)}, slots=1, decode=boom)
    outer = Endpoint(EndpointConfig(name="g"), BatchConfig(max_size=1, idle="go"), pool)
    await outer.start()
    try:
        with pytest.raises(ForebayError) as caught:
            await asyncio.wait_for(outer.call({"x": 1}), PATIENCE_S)
        assert failure_of(caught.value).error is caught.value
    finally:
        await outer.drain(0.0)
