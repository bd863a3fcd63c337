# SPDX-License-Identifier: Apache-2.0
"""Traces for OpenTelemetry: a span for each call of a model, with its waits, batches and runs below.

Theory of operation. Nothing is measured here: a call that has ended (`access_log.py`) and a batch that was answered
(`timeline.py`) are told with all of their moments, and become spans afterwards. They belong together by the id that the
server gave the request, for clients may choose the same. A batch may be reported before its call, as in the nodes of a
graph, or after it; whichever comes first waits, within bounds. A batch is in the trace of every call that it answers,
linked to the other ones. The exporter's own thread sends what there is; a collector that does not take it keeps the
server from ending for no more than a moment, as the exporter would try again for half a minute.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from forebay.errors import ConfigError
from forebay.observe.logs.access_log import HANDED_ON, CallListeners, EndedCall
from forebay.observe.traces.timeline import BatchRecord, Step, Timeline
from forebay.observe.traces.trace_context import TraceContexts
from forebay.types.failures import text_of
from forebay.types.server_state import here
from forebay.types.user_exceptions import caught

# The packages need not be installed where this file is type-checked, so what comes from them is `Any`.
TracerProvider: TypeAlias = Any
SpanContext: TypeAlias = Any

log = logging.getLogger("forebay")

KEPT: Final = 10_000
"""Calls whose batches may still come, and calls that may still come for batches."""
MAX_LINKS: Final = 32
"""Calls that a batch is linked to."""
MAX_NODES: Final = 256
"""Batches of one call that wait for it."""
END_S: Final = 3.0
"""How long the last spans may take to be sent."""


class Tracing:
    """Makes spans of calls and batches, on the loop; these are reported to `called` and `ran`."""

    def __init__(self, provider: TracerProvider) -> None:
        """Make one; what the provider's processors do with a span is their affair."""
        self._provider = provider
        self._api: Any = importlib.import_module("opentelemetry.trace")
        self._span: Any = importlib.import_module("opentelemetry.sdk.trace").ReadableSpan
        scopes: Any = importlib.import_module("opentelemetry.sdk.util.instrumentation")
        self._scope = scopes.InstrumentationScope("forebay")
        propagation: Any = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        self._propagator = propagation.TraceContextTextMapPropagator()
        self._calls: OrderedDict[str, SpanContext | None] = OrderedDict()
        self._waiting: OrderedDict[str, list[tuple[BatchRecord, Step]]] = OrderedDict()
        self._begun: OrderedDict[str, SpanContext] = OrderedDict()

    def begin(self, run_id: str, parent: str) -> str:
        """Return the `traceparent` of a call that has not ended: others make spans below its own.

        Args:
            run_id: What its batches call it.
            parent: The caller's `traceparent`.
        """
        own = self._begun.get(run_id)
        if own is None:  # else it is handed on in several parts, or once more
            api = self._api
            context = self._propagator.extract({"traceparent": parent} if parent else {})
            above = api.get_current_span(context).get_span_context()
            ids = self._provider.id_generator
            trace_id = above.trace_id if above.is_valid else ids.generate_trace_id()
            sampled = self._provider.sampler.should_sample(context, trace_id, "", api.SpanKind.SERVER, {})
            flags = api.TraceFlags(api.TraceFlags.SAMPLED if sampled.decision.is_sampled() else api.TraceFlags.DEFAULT)
            own = api.SpanContext(trace_id, ids.generate_span_id(), is_remote=False, trace_flags=flags)
            _keep(self._begun, run_id, own)
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"

    def called(self, call: EndedCall) -> None:
        """Make the span of a call, and of the batches that waited for it; pages and probes have none."""
        api = self._api
        is_grpc = call.method == "gRPC"
        if not call.model and call.method in {"GET", "HEAD", "OPTIONS"}:
            return
        context = self._propagator.extract({"traceparent": call.parent} if call.parent else {})
        parent = api.get_current_span(context).get_span_context()
        ids = self._provider.id_generator
        begun = self._begun.pop(call.run_id, None)
        trace_id = parent.trace_id if parent.is_valid else ids.generate_trace_id()
        trace_id = trace_id if begun is None else begun.trace_id
        name = call.path.removeprefix("/") if is_grpc else f"{call.method} {call.path}"
        attributes: dict[str, Any] = {"client.address": call.client, "forebay.code": call.code}
        if is_grpc:
            attributes |= {"rpc.system": "grpc", "rpc.grpc.status_code": call.status}
        elif call.method != HANDED_ON:
            attributes |= {"http.request.method": call.method, "url.path": call.path}
            attributes |= {"http.response.status_code": call.status, "http.response.body.size": call.body_bytes}
        cost_ms = round(call.cost_s * 1000, 3)
        for what, value in (
            ("model", call.model),
            ("request_id", call.request_id),
            ("batch_size", call.batch_size),
            ("cost_ms", cost_ms),
        ):
            if value:
                attributes[f"forebay.{what}"] = value
        sampled = self._provider.sampler.should_sample(context, trace_id, name, api.SpanKind.SERVER, attributes)
        own: SpanContext | None = None
        if begun is not None:
            own = begun if begun.trace_flags.sampled else None
        elif sampled.decision.is_sampled():
            flags = api.TraceFlags(api.TraceFlags.SAMPLED)
            own = api.SpanContext(trace_id, ids.generate_span_id(), is_remote=False, trace_flags=flags)
        waiting = self._waiting.pop(call.run_id, ())
        if call.run_id:
            _keep(self._calls, call.run_id, own)
        if own is None:
            return
        for record, step in waiting:
            self._emit_batch(own, record, step)
        is_wrong = call.status != 0 if is_grpc else call.status >= 500
        self._emit(
            name,
            own,
            parent if parent.is_valid else None,
            (call.started or call.ended, call.ended),
            {**attributes, **(sampled.attributes or {})},
            kind=api.SpanKind.SERVER,
            error=call.code if is_wrong else "",
        )

    def ran(self, record: BatchRecord) -> None:
        """Make the spans of a batch for each of its calls, or let them wait for those that have not ended."""
        for step in record.steps:
            if step.run_id in self._calls:
                call = self._calls[step.run_id]
                if call is not None:
                    self._emit_batch(call, record, step)
                continue
            waiting = self._waiting.get(step.run_id)
            if waiting is None:
                waiting = _keep(self._waiting, step.run_id, list[tuple[Any, Any]]())
            if len(waiting) < MAX_NODES:
                waiting.append((record, step))

    def _emit_batch(self, call: SpanContext, record: BatchRecord, step: Step) -> None:
        name = record.endpoint.name
        others = (self._calls.get(other.run_id) for other in record.steps[: MAX_LINKS + 1] if other is not step)
        links = [self._api.Link(other) for other in others if other is not None][:MAX_LINKS]
        rows = sum(one.size for one in record.steps)
        attributes = {"forebay.model": name, "forebay.batch_size": rows, "forebay.worker": record.worker}
        self._emit(f"queue {name}", self._below(call), call, (step.arrived, record.taken), {"forebay.model": name})
        batch = self._below(call)
        self._emit(f"batch {name}", batch, call, (record.taken, record.done), attributes, links=links)
        if record.started:
            about = {"forebay.model": name, "process.pid": record.pid}
            self._emit(f"model {name}", self._below(call), batch, (record.started, record.ended), about)

    def _below(self, call: SpanContext) -> SpanContext:
        number = self._provider.id_generator.generate_span_id()
        return self._api.SpanContext(call.trace_id, number, is_remote=False, trace_flags=call.trace_flags)

    def _emit(  # noqa: PLR0913 - a span has so many parts
        self,
        name: str,
        own: SpanContext,
        parent: SpanContext | None,
        moments: tuple[float, float],
        attributes: dict[str, Any],
        *,
        kind: Any = None,
        links: Sequence[Any] = (),
        error: str = "",
    ) -> None:
        api = self._api
        since_epoch = time.time_ns() - time.monotonic_ns()
        began, ended = (since_epoch + round(moment * 1e9) for moment in moments)
        span = self._span(
            name,
            own,
            parent,
            self._provider.resource,
            attributes,
            links=links,
            kind=kind or api.SpanKind.INTERNAL,
            status=api.Status(api.StatusCode.ERROR, error) if error else api.Status(),
            start_time=began,
            end_time=max(began, ended),
            instrumentation_scope=self._scope,
        )
        processor: Any = getattr(self._provider, "_active_span_processor")  # noqa: B009 - what `add_span_processor` fills
        processor.on_end(span)


def _keep(kept: OrderedDict[str, Any], key: str, value: Any) -> Any:
    kept[key] = value
    if len(kept) > KEPT:
        kept.popitem(last=False)
    return value


def provider() -> TracerProvider | None:
    """Return what sends spans where the OTEL_* variables say, an OTLP collector on this machine if they do not.

    Returns:
        None if they say that there are to be no traces.

    Raises:
        ConfigError: If the packages are not installed, or a variable says what is not possible.
    """
    if _says("OTEL_SDK_DISABLED", "true") or _says("OTEL_TRACES_EXPORTER", "none"):
        return None
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((os.environ[name] for name in names if os.environ.get(name)), "http/protobuf")
    if protocol not in {"grpc", "http/protobuf"}:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: expected grpc or http/protobuf, got {protocol!r}")
    way = protocol.partition("/")[0]
    try:
        resources: Any = importlib.import_module("opentelemetry.sdk.resources")
        sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
        export: Any = importlib.import_module("opentelemetry.sdk.trace.export")
        otlp: Any = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{way}.trace_exporter")
    except ImportError as error:
        msg = f"--otel needs packages that are not installed ({error.name}): pip install 'forebay[otel]'"
        raise ConfigError(msg) from error
    about = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "forebay"}

    def make() -> TracerProvider:
        made = sdk.TracerProvider(resource=resources.Resource.create(about))
        made.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
        return made

    made, failed = caught(make)
    if failed is not None:
        raise ConfigError(f"the OTEL_* variables cannot be followed: {text_of(failed)}") from failed
    return made


def _says(name: str, value: str) -> bool:
    return os.environ.get(name, "").strip().lower() == value


@contextmanager
def tracing(given: TracerProvider | None = None) -> Generator[None]:
    """Make spans of what happens in the block, on ports that are made in it.

    Args:
        given: What takes the spans; None for what the OTEL_* variables say.

    Raises:
        ConfigError: See `provider`.
    """
    made = given or provider()
    if made is None:
        yield
        return
    spans = Tracing(made)
    try:
        with here(CallListeners).listening(spans.called), here(Timeline).listening(spans.ran):
            here(TraceContexts).begin = spans.begin
            yield
    finally:
        here(TraceContexts).begin = None
        _end(made)


def _end(made: TracerProvider) -> None:
    ending = threading.Thread(target=made.shutdown, name="forebay-last-spans", daemon=True)
    ending.start()
    ending.join(END_S)
    if ending.is_alive():
        log.warning("the last spans are lost: the collector did not accept them within %g s", END_S)
