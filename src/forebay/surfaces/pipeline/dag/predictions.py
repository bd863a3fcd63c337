# SPDX-License-Identifier: Apache-2.0
"""Requests to a pipeline from the wire to their answers, whether their graph is in this process or in others.

A prediction is the request that its graph's endpoint gets, so that it needs no task and no future of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import ConfigError, ForebayError, Unavailable
from forebay.surfaces.pipeline import codes, logs
from forebay.surfaces.pipeline.figures.profile import CallTimes
from forebay.surfaces.pipeline.ops import packing
from forebay.types.call import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.pipeline.config import ErrorCodes, PipelineConfig
    from forebay.surfaces.pipeline.figures.profile import RequestProfile
    from forebay.types.call import Outcome
    from forebay.types.tenant import Tenant
    from forebay.workers.user_calls.hanging_calls import LoopCall

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
        message: Any,
        *,
        deadline: float,
        peer: str,
        respond: Respond,
        came: float | None = None,
        parent: str = "",
        tenant: Tenant | None = None,
    ) -> Callable[[], object]:
        """Answer one request.

        Args:
            deadline: Absolute, in seconds of `time.monotonic`; infinity takes the configured time.
            peer: Who sent it, for the log.
            respond: Called on the loop, once, unless the request is called off: with the answer, whose `err_no` says
                whether it is an error, or with a `ForebayError` where the transport is to tell that there is none.
            came: When it came in, in seconds of `time.monotonic`, if it was in another process before; None means now.
            parent: The caller's `traceparent`.
            tenant: Whose it is, where the server tells tenants apart.

        Returns:
            What calls it off.
        """
        if not self.endpoint.accepting and not self.is_closing:
            respond(Unavailable("the ops are still loading; try again later"), None)
            return _nothing
        now = time.monotonic()
        times = CallTimes(now) if came is None else CallTimes(came, entered=now)
        asked = Prediction(
            body=None,
            reply=self._replied,
            deadline=min(deadline, times.started + self.endpoint.config.timeout_s),
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
        """Answer one request, from a coroutine; see `submit`.

        Raises:
            ForebayError: If the transport is to tell that there is no answer.
        """
        found, _ = await self.settled(message, **more)
        if isinstance(found, ForebayError):
            raise found
        return found

    async def settled(self, message: Any, **more: Any) -> tuple[Any, Prediction | None]:
        """Return what `submit` hands to `respond`."""
        told: asyncio.Future[tuple[Any, Prediction | None]] = asyncio.get_running_loop().create_future()
        call_off = self.submit(message, respond=lambda found, asked: told.set_result((found, asked)), **more)
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
        """Forget a request whose client went away."""
        prediction.respond = None
        if prediction in self._open:
            self._call_off(prediction)

    def _call_off(self, prediction: Prediction) -> None:
        self.endpoint.cancel(prediction.attempt or prediction)


def _nothing() -> None:
    """There is nothing to call off."""


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
