# SPDX-License-Identifier: Apache-2.0
"""The standard health service: every service of the port is SERVING while the app has no problem."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from forebay.errors import InvalidRequest, NotFound, Unavailable
from forebay.transports.grpc.service import GrpcService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from forebay.transports.grpc.service import Call

SERVICE: Final = "grpc.health.v1.Health"
LOOK_AGAIN_S: Final = 0.5
"""How soon a change is told to those who watch."""

_Answer: Final[Any] = health_pb2.HealthCheckResponse


class Health:
    """Answers Check and Watch.

    Attributes:
        is_stopping: Set when the port closes: nobody is told anything good any more, and watching ends.
    """

    def __init__(self, services: Collection[str], is_ready: Callable[[], bool]) -> None:
        """Describe the service.

        Args:
            services: Names that may be asked for, beside the empty one.
            is_ready: Whether calls can be answered now.
        """
        self.is_stopping = False
        self._services = {"", SERVICE, *services}
        self._is_ready = is_ready

    def service(self) -> GrpcService:
        """Return what a port is given."""
        files = [health_pb2.DESCRIPTOR.serialized_pb]
        return GrpcService(
            full_name=SERVICE, direct={"Check": self._check}, streams={"Watch": self._watch}, files=files
        )

    def _check(self, data: bytes, call: Call) -> None:
        if _asked(data) not in self._services:
            msg = "no such service"
            raise NotFound(msg)
        call.reply(self._status())

    async def _watch(self, messages: AsyncIterator[bytes], _call: Call) -> AsyncIterator[bytes]:
        data = await anext(messages, None)
        if data is None:
            msg = "nothing was asked for"
            raise InvalidRequest(msg)
        if _asked(data) not in self._services:
            yield _Answer(status=_Answer.SERVICE_UNKNOWN).SerializeToString()
            return
        told = b"nothing"
        while True:
            now = self._status()
            if now != told:
                yield now
                told = now
            if self.is_stopping:
                msg = "the server is stopping"
                raise Unavailable(msg)
            await asyncio.sleep(LOOK_AGAIN_S)

    def _status(self) -> bytes:
        is_serving = not self.is_stopping and self._is_ready()
        return _Answer(status=_Answer.SERVING if is_serving else _Answer.NOT_SERVING).SerializeToString()


def _asked(data: bytes) -> str:
    try:
        request: Any = health_pb2.HealthCheckRequest.FromString(data)
    except DecodeError as error:
        msg = f"the request is no {SERVICE} message: {error}"
        raise InvalidRequest(msg) from error
    return request.service
