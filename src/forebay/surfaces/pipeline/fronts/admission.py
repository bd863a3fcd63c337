# SPDX-License-Identifier: Apache-2.0
"""What both ports of a pipeline share: which requests are refused, and what clients are told of errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ForebayError, InternalError, QueueFull, UserCodeError
from forebay.surfaces.pipeline.codes import CustomExceptionCode

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.dag.predictions import Prediction, Predictions, Respond
    from forebay.types.tenant import Tenant

log = logging.getLogger("forebay.requests")

_readers: Final = ThreadPoolExecutor(2, thread_name_prefix="forebay-pipeline-read")
"""Where large requests are read; nothing of the project's runs there."""


def begin(
    inference: Predictions,
    parse: Callable[[], Any],
    *,
    is_quick: bool,
    respond: Respond,
    tenant: Tenant | None = None,
    **more: Any,
) -> Callable[[], object] | None:
    """Read a request and answer it, or refuse it: what it asks for does not exist, or there is no room.

    Args:
        inference: Who answers.
        parse: Reads the request; raises a `ForebayError` if it is wrong.
        is_quick: Whether reading takes only a moment; otherwise it is done beside the loop.
        respond: Called on the loop, once, unless the request is called off. If it raises, it is called again with the
            error that the client is to see.
        tenant: Whose it is, where the server tells tenants apart.
        more: See `Predictions.submit`.

    Returns:
        What calls the request off; None if it has been answered.
    """
    endpoint = inference.endpoint
    if endpoint.is_full_for(tenant):  # before anything is read
        full = QueueFull(f"the queue of '{endpoint.name}' is full; try again later")
        endpoint.reject(full, tenant=tenant)
        respond(full, None)
        return None
    safely, more = partial(_respond, respond), {**more, "tenant": tenant}
    if not is_quick:
        return asyncio.ensure_future(_answer_large(inference, parse, safely, more)).cancel
    try:
        request = parse()
    except ForebayError as error:
        respond(error, None)
        return None
    refusal = refused(inference, request)
    if refusal is not None:
        respond(refusal, None)
        return None
    return inference.submit(request, respond=safely, **more)


async def _answer_large(
    inference: Predictions, parse: Callable[[], Any], respond: Respond, more: Mapping[str, Any]
) -> None:
    asked = None
    try:
        request = await asyncio.get_running_loop().run_in_executor(_readers, parse)
        found = refused(inference, request)
        if found is None:
            found, asked = await inference.settled(request, **more)
    except Exception as error:  # noqa: BLE001 - this client is told, and no other hears of it
        found = _told(error)
    respond(found, asked)


def refused(inference: Predictions, request: Any) -> Any:
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
    return inference.error(code.value, text)


def _told(error: Exception) -> ForebayError:
    """Return what a client is told of an error; one that is no error of a request is logged."""
    if isinstance(error, UserCodeError):  # whoever ran that code has logged it
        return InternalError("the model failed; the server's log says why")
    if isinstance(error, ForebayError):
        return error
    log.error("a request could not be answered", exc_info=error)
    return InternalError("the server failed; its log says why")


def _respond(respond: Respond, found: Any, asked: Prediction | None) -> None:
    try:
        respond(found, asked)
    except Exception as error:  # noqa: BLE001 - a defect must not leave a client without an answer
        respond(_told(error), asked)
