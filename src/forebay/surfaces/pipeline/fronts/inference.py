# SPDX-License-Identifier: Apache-2.0
"""What both ports have of a pipeline: what answers, which requests are refused, and what clients are told of errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from forebay.errors import ForebayError, InternalError, QueueFull, UserCodeError
from forebay.surfaces.pipeline.codes import CustomExceptionCode, numbered
from forebay.surfaces.pipeline.dag.service import PipelineService
from forebay.surfaces.pipeline.ops import packing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.surfaces.pipeline.config import ErrorCodes
    from forebay.surfaces.pipeline.dag.service import Respond

log = logging.getLogger("forebay.requests")

T = TypeVar("T")


class Inference(Protocol):
    """The graph behind the ports.

    Attributes:
        request_class: The message a request is: the usual one, or the user's own.
        response_class: The message an answer is.
        name: What requests may name the service as; without a name any is accepted.
        methods: What requests may call; None allows anything.
        error_codes: Which generation's numbers answers carry.
    """

    request_class: Any
    response_class: Any
    name: str
    methods: Sequence[str] | None
    error_codes: ErrorCodes

    async def infer(self, request: Any, *, timeout_s: float | None, peer: str) -> Any:
        """Answer a request; what went wrong in the graph stands in the answer.

        Raises:
            ForebayError: For faults of the transport only: too many requests, no time left, not ready.
        """
        ...


_readers: Final = ThreadPoolExecutor(2, thread_name_prefix="forebay-pipeline-read")
"""Where large requests are read; nothing of the project's runs there."""


async def read(parse: Callable[[], T]) -> T:
    """Read a request that takes its time beside the loop."""
    return await asyncio.get_running_loop().run_in_executor(_readers, parse)


async def answer(inference: Inference, request: Any, *, timeout_s: float | None, peer: str) -> Any:
    """Answer a request, or say that it names another service or method than there are."""
    refusal = refused(inference, request)
    return refusal or await inference.infer(request, timeout_s=timeout_s, peer=peer)


def begin(
    inference: Inference, request: Any, *, deadline: float, peer: str, respond: Respond
) -> Callable[[], object] | None:
    """Answer a request as `answer` does, and without a task where that is possible.

    Args:
        inference: Who answers.
        request: What came in.
        deadline: Absolute, in seconds of `time.monotonic`; infinity if the client has time.
        peer: Who sent it, for the log.
        respond: Called on the loop, once, unless the request is called off. If it raises, it is called with what the
            client is to be told of that.

    Returns:
        What calls the request off; None if it has been answered.
    """
    refusal = refused(inference, request)
    if refusal is not None:
        respond(refusal)
        return None
    safely = partial(_respond, respond)
    if isinstance(inference, PipelineService):
        if inference.endpoint.is_full():  # before anything is read
            full = QueueFull(f"the queue of '{inference.endpoint.name}' is full; try again later")
            inference.endpoint.reject(full)
            respond(full)
            return None
        direct = inference.submit(request, deadline=deadline, peer=peer, respond=safely)
        if direct is not None:
            return partial(inference.cancel, direct)
    return asyncio.ensure_future(_infer(inference, request, deadline, peer, safely)).cancel


def refused(inference: Inference, request: Any) -> Any:
    """Return the answer to a request for another service, or for a method that is not allowed; None if it is neither.

    A request over gRPC need not name either.
    """
    name, method = getattr(request, "name", ""), getattr(request, "method", "")
    if name and inference.name and name != inference.name:
        code = CustomExceptionCode.NO_SERVICE
        text = f"service name error: this server serves {inference.name!r}, not {name[:100]!r}"
    elif method and inference.methods is not None and method not in inference.methods:
        code = CustomExceptionCode.NOT_IMPLEMENTED
        allowed = " and ".join(map(repr, inference.methods))
        text = f"method error: this server has {allowed or 'no methods'}, not {method[:100]!r}"
    else:
        return None
    return packing.pack_error(numbered(code.value, inference.error_codes), text, inference.response_class)


def told(error: Exception) -> ForebayError:
    """Return what a client is told of an error; one that is no error of a request is logged."""
    if isinstance(error, UserCodeError):  # whoever ran that code has logged it
        return InternalError("the model failed; the server's log says why")
    if isinstance(error, ForebayError):
        return error
    log.error("a request could not be answered", exc_info=error)
    return InternalError("the server failed; its log says why")


async def _infer(inference: Inference, request: Any, deadline: float, peer: str, respond: Respond) -> None:
    timeout_s = None if deadline == float("inf") else max(deadline - time.monotonic(), 0.001)
    try:
        found = await inference.infer(request, timeout_s=timeout_s, peer=peer)
    except Exception as error:  # noqa: BLE001 - whatever it is, this client is told and no other hears of it
        found = told(error)
    respond(found)


def _respond(respond: Respond, found: Any) -> None:
    try:
        respond(found)
    except Exception as error:  # noqa: BLE001 - a defect must not leave a client without an answer
        respond(told(error))
