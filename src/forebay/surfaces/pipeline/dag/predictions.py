# SPDX-License-Identifier: Apache-2.0
"""Requests to a pipeline from the wire to their answers, whether their graph is in this process or in others.

A prediction is the request that its graph's endpoint gets, so that it needs no task and no future of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ConfigError, ForebayError, InternalError, QueueFull, Unavailable, UserCodeError
from forebay.surfaces.pipeline import codes, logs
from forebay.surfaces.pipeline.figures.profile import CallTimes, RequestProfile
from forebay.surfaces.pipeline.ops import packing
from forebay.types.call import Outcome, Request, nothing

if TYPE_CHECKING:
    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.config import ErrorCodes, PipelineConfig
    from forebay.types.tenant import Tenant
    from forebay.workers.user_calls.hanging_calls import LoopCall

log = logging.getLogger("forebay.requests")

_NEVER: Final = float("inf")

_readers: Final = ThreadPoolExecutor(2, thread_name_prefix="forebay-pipeline-read")
"""Where large requests are read; nothing of the project's runs there."""

Respond = Callable[[Any, "Prediction | None"], None]
"""Takes the answer, or the `ForebayError` that is a fault of the transport; and the prediction, if it became one."""


class Prediction(Request, kw_only=True, gc=False, eq=False):
    """A request to a pipeline.

    Attributes:
        peer: Who sent it, for the log.
        times: When it reached each stage.
        parent: The caller's `traceparent`.
        respond: Takes its answer; None once nobody waits for one.
        data_id: Its number; -1 where the process with its graph gives it one.
        log_id: The number the client gave it.
        attempt: The request the graph has instead of this one, where it may be tried again.
        beside: The project's code that runs for it beside the loop.
        profile: Collects the profile of a client that asks for it.
        is_leaving: Whether its answer is being written.
        is_cut: Whether it was called off because the server stops.
    """

    message: Any
    peer: str
    times: CallTimes
    respond: Respond | None
    data_id: int = -1
    log_id: Any = 0
    parent: str = ""
    attempt: Request | None = None
    beside: LoopCall | None = None
    profile: RequestProfile | None = None
    is_leaving: bool = False
    is_cut: bool = False


class Predictions:
    """What answers requests to a pipeline.

    Attributes:
        name: What requests may name it as; with an empty name any will do.
        request_class: Message of a request: the usual one, or the user's own, which may have none of its fields.
        response_class: Message of an answer; one of the user's own has `err_no` and `err_msg`, and maybe no others.
        methods: What requests may call; None allows anything.
        error_codes: Which generation's numbers answers carry.
        is_closing: Set when the server begins to stop.
    """

    def __init__(self, name: str, endpoint: Endpoint, config: PipelineConfig) -> None:
        self.name = name
        self.request_class, self.response_class = messages_of(config)
        self.methods: Sequence[str] | None = config.methods
        self.error_codes: ErrorCodes = config.error_codes
        self.endpoint = endpoint
        self.is_closing = False
        self._open: set[Prediction] = set()

    def submit(
        self,
        parse: Callable[[], Any],
        *,
        is_quick: bool,
        respond: Respond,
        tenant: Tenant | None = None,
        **more: Any,
    ) -> Callable[[], object] | None:
        """Read a request and answer it, or refuse it: what it asks for does not exist, or there is no room.

        Args:
            parse: Reads the request; raises a `ForebayError` if it is wrong.
            is_quick: Whether reading takes only a moment; otherwise it is done beside the loop.
            respond: Called on the loop, once, unless the request is called off: with the answer, whose `err_no` says
                whether it is an error, or with a `ForebayError` where the transport is to tell that there is none. If
                it raises, it is called again with the error that the client is to see.
            more: See `_admit`.

        Returns:
            What calls the request off; None if it has been answered.
        """
        endpoint = self.endpoint
        if endpoint.is_full_for(tenant):  # before anything is read
            full = QueueFull(f"the queue of '{endpoint.name}' is full; try again later")
            endpoint.reject(full, tenant=tenant)
            respond(full, None)
            return None
        safely, more = partial(_safely, respond), {**more, "tenant": tenant}
        if not is_quick:
            return asyncio.ensure_future(self._answer_large(parse, safely, more)).cancel
        message = None
        try:
            message = parse()
            found = self._refused(message)
        except ForebayError as error:
            found = error
        if found is not None:
            respond(found, None)
            return None
        return self._admit(message, respond=safely, **more)

    async def _answer_large(self, parse: Callable[[], Any], respond: Respond, more: Mapping[str, Any]) -> None:
        asked = None
        try:
            message = await asyncio.get_running_loop().run_in_executor(_readers, parse)
            found = self._refused(message)
            if found is None:
                found, asked = await self._settled(message, **more)
        except Exception as error:  # noqa: BLE001 - this client is told, and no other hears of it
            found = client_error(error)
        respond(found, asked)

    def _refused(self, message: Any) -> Any:
        """Return the answer to a request for another service or for a method that is not allowed; None for others.

        A request over gRPC need not name either.
        """
        name, method = getattr(message, "name", ""), getattr(message, "method", "")
        if name and self.name and name != self.name:
            code = codes.CustomExceptionCode.NO_SERVICE
            text = f"service name error: this server serves {self.name!r}, not {name[:100]!r}"
        elif method and self.methods is not None and method not in self.methods:
            code = codes.CustomExceptionCode.NOT_IMPLEMENTED
            allowed = " and ".join(map(repr, self.methods))
            text = f"method error: this server has {allowed or 'no methods'}, not {method[:100]!r}"
        else:
            return None
        return self.error(code.value, text)

    def _admit(
        self,
        message: Any,
        *,
        deadline: float,
        peer: str,
        respond: Respond,
        came: float | None = None,
        parent: str = "",
        tenant: Tenant | None = None,
    ) -> Callable[[], object]:
        """Answer a request that was read and not refused; returns what calls it off.

        Args:
            deadline: What the client states, in seconds of `time.monotonic`; infinity takes the tenant's, else the
                configured time.
            came: When it came in, in seconds of `time.monotonic`, if it was in another process before; None means now.
        """
        if not self.endpoint.accepting and not self.is_closing:
            respond(Unavailable("the ops are still loading; try again later"), None)
            return nothing
        now = time.monotonic()
        times = CallTimes(now) if came is None else CallTimes(came, entered=now)
        if tenant is not None and deadline == _NEVER:
            deadline = times.started + tenant.deadline_s
        until = min(deadline, times.started + self.endpoint.config.timeout_s)
        is_due = deadline != _NEVER and came is None  # else another process has let it in
        asked = Prediction(
            body=None,
            reply=self._replied,
            deadline=until,
            due=until if is_due else _NEVER,
            message=message,
            peer=peer,
            times=times,
            respond=respond,
            log_id=getattr(message, "logid", 0),
            parent=parent,
            tenant=tenant,
        )
        self._open.add(asked)
        self._begin(asked)
        return partial(self._cancel, asked)

    def _begin(self, asked: Prediction) -> None:
        """Bring a request to the endpoint."""
        raise NotImplementedError

    def _replied(self, asked: Request, outcome: Outcome) -> None:
        """Take what came of it there; `_respond` ends it."""
        raise NotImplementedError

    @property
    def problem(self) -> str:
        """Why requests cannot be answered, although the ops could work; empty if they can."""
        return ""

    async def answer(self, message: Any, **more: Any) -> Any:
        """Answer one request that was read, from a coroutine; see `_admit`.

        Raises:
            ForebayError: If the transport is to tell that there is no answer.
        """
        found, _ = await self._settled(message, **more)
        if isinstance(found, ForebayError):
            raise found
        return found

    async def _settled(self, message: Any, **more: Any) -> tuple[Any, Prediction | None]:
        """Return what `_admit` hands to `respond`."""
        told: asyncio.Future[tuple[Any, Prediction | None]] = asyncio.get_running_loop().create_future()
        call_off = self._admit(message, respond=lambda found, asked: told.set_result((found, asked)), **more)
        try:
            return await told
        except asyncio.CancelledError:
            call_off()
            raise

    def error(self, err_no: int, text: str, *, is_product: bool = False) -> Any:
        """Return the usual answer to a request that failed.

        Args:
            err_no: One of `CustomExceptionCode`, or the project's own number.
            is_product: Whether it is the project's own, which is the same for all generations.
        """
        number = err_no if is_product else codes.numbered(err_no, self.error_codes)
        return packing.pack_error(number, text, self.response_class)

    def cut(self) -> None:
        """End all waiting: requests whose answer is not being written yet are told that there will be none."""
        for prediction in list(self._open):
            if not prediction.is_leaving:
                prediction.is_cut = True
                self._call_off(prediction)

    def _respond(self, prediction: Prediction, answer: Any) -> None:
        self._open.discard(prediction)
        respond, prediction.respond = prediction.respond, None
        if respond is not None:
            respond(answer, prediction)

    def _cancel(self, prediction: Prediction) -> None:
        prediction.respond = None
        if prediction in self._open:
            self._call_off(prediction)

    def _call_off(self, prediction: Prediction) -> None:
        self.endpoint.cancel(prediction.attempt or prediction)


def client_error(error: Exception) -> ForebayError:
    """Return what a client is told of an error; one that is not an error of a request is logged."""
    if isinstance(error, UserCodeError):  # whoever ran that code has logged it
        return InternalError("the model failed; the server's log says why")
    if isinstance(error, ForebayError):
        return error
    log.error("failed to answer a request", exc_info=error)
    return InternalError("the server failed; its log says why")


def _safely(respond: Respond, found: Any, asked: Prediction | None) -> None:
    try:
        respond(found, asked)
    except Exception as error:  # noqa: BLE001 - a defect must not leave a client without an answer
        respond(client_error(error), asked)


def stopped() -> Unavailable:
    """Return why a request is not answered that was cut."""
    return Unavailable("the server stopped before the request was answered")


def log_call(prediction: Prediction, response: Any) -> None:
    """Write the line of a request that was answered."""
    if logs.requests.isEnabledFor(logging.INFO):
        text = "(data_id=%s log_id=%s) %s from %s: err_no %d, %.1f ms"
        data_id = "-" if prediction.data_id < 0 else prediction.data_id
        method = getattr(prediction.message, "method", "") or "inference"
        taken_ms = (prediction.times.ended - prediction.times.started) * 1000
        logs.requests.info(text, data_id, prediction.log_id, method, prediction.peer, response.err_no, taken_ms)


def messages_of(config: PipelineConfig) -> tuple[Any, Any]:
    """Return the classes of requests and answers: the project's own, or the usual ones.

    Raises:
        ConfigError: If the project's own cannot be loaded.
    """
    if config.proto is None:
        from forebay.surfaces.pipeline.protocol.messages import Request, Response

        return Request, Response
    from forebay.surfaces.pipeline.fronts.schema import load

    try:
        return load(config.proto, Path(config.folder))
    except ConfigError as error:
        raise ConfigError(config.at("proto", error.message)) from error
