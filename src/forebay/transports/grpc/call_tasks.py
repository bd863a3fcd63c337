# SPDX-License-Identifier: Apache-2.0
"""The part of a method that waits for something: it is called off with its call, and what it raises answers that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from forebay.errors import ForebayError, InternalError

if TYPE_CHECKING:
    from forebay.transports.grpc.service import Call
    from forebay.transports.grpc.statuses import Status

log = logging.getLogger("forebay.requests")


def run_beside(work: Callable[[], Awaitable[None]], call: Call, own: Mapping[type[ForebayError], Status]) -> None:
    """Do work for a call in a task, whose errors have the statuses of a service."""

    async def run() -> None:
        try:
            await work()
        except ForebayError as error:
            call.fail(error, own)
        except Exception:
            log.exception("a gRPC call failed; this is a defect of forebay")
            call.fail(InternalError("the server failed; its log says why"), own)

    call.on_cancel = asyncio.ensure_future(run()).cancel
