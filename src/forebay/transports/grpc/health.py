# SPDX-License-Identifier: Apache-2.0
"""The standard health service: services of the port are SERVING while the app has no problem, models while ready."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, Final

from forebay.errors import InvalidRequest, NotFound, Unavailable
from forebay.transports.grpc.service import Call, GrpcService
from forebay.types.proto_tables import ProtoMethod, ProtoTable

SERVICE: Final = "grpc.health.v1.Health"
LOOK_AGAIN_S: Final = 0.5
"""How soon a change is told to those who watch."""
MAX_NAME: Final = 1024
"""Longest name that is asked for: those of which nothing is known are watched, too, and kept meanwhile."""

MESSAGES: Final = ProtoTable(
    file="grpc_health/v1/health.proto",
    package="grpc.health.v1",
    messages={
        "HealthCheckRequest": "1 string service",
        "HealthCheckResponse": "1 !.ServingStatus status",
        "HealthListRequest": "",
        "HealthListResponse": "1 map:HealthCheckResponse statuses",
    },
    enums={
        "HealthCheckResponse.ServingStatus": {"UNKNOWN": 0, "SERVING": 1, "NOT_SERVING": 2, "SERVICE_UNKNOWN": 3},
    },
    services={
        "Health": {
            "Check": ProtoMethod("HealthCheckRequest", "HealthCheckResponse"),
            "List": ProtoMethod("HealthListRequest", "HealthListResponse"),
            "Watch": ProtoMethod("HealthCheckRequest", "HealthCheckResponse", is_answer_streamed=True),
        }
    },
)

_Answer: Final[Any] = MESSAGES.classes().HealthCheckResponse
_UNKNOWN: Final[bytes] = _Answer(status=_Answer.SERVICE_UNKNOWN).SerializeToString()


class Health:
    """Answers Check, List and Watch.

    A list has the services of the port. Models are asked for by name: who needs no key is not told which there are.

    One look tells all who watch: they wait for the same future.

    Attributes:
        looks_at_a_time: Timers that are set to look again: one while anybody watches.
    """

    def __init__(
        self,
        services: Collection[str],
        is_ready: Callable[[], bool],
        is_model_ready: Callable[[str], bool | None] = lambda _: None,
    ) -> None:
        """Describe the service.

        Args:
            services: Names that may be asked for, beside the empty one.
            is_ready: Whether calls can be answered now.
            is_model_ready: The same of a model; None if there is none of that name.
        """
        self.looks_at_a_time = 0
        self._is_stopping = False
        self._services = {"", SERVICE, *services}
        self._is_ready = is_ready
        self._is_model_ready = is_model_ready
        self._watching: Counter[str] = Counter()
        self._told: dict[str, bytes] = {}
        self._change: asyncio.Future[None] | None = None

    def stop(self) -> None:
        """Answer NOT_SERVING from now on, and end all watches: the port closes."""
        self._is_stopping = True
        self._tell()

    def service(self) -> GrpcService:
        """Return what a port is given."""
        return GrpcService(
            full_name=SERVICE,
            direct={"Check": self._check, "List": self._list},
            streams={"Watch": self._watch},
            public=("Check", "List", "Watch"),
            files=MESSAGES.described(),
        )

    def _check(self, data: bytes, call: Call) -> None:
        status = self._status(_asked(data))
        if status == _UNKNOWN:
            raise NotFound("no such service")
        call.reply(status)

    def _list(self, data: bytes, call: Call) -> None:
        MESSAGES.parsed("HealthListRequest", data)
        listed = MESSAGES.classes().HealthListResponse()
        for name in self._services:
            listed.statuses[name].ParseFromString(self._status(name))
        call.reply(listed.SerializeToString())

    async def _watch(self, messages: AsyncIterator[bytes], _call: Call) -> AsyncIterator[bytes]:
        asked = await _first_asked(messages)
        told = b""
        self._watching[asked] += 1
        try:
            while True:
                change = self._next_change()
                now = self._status(asked)
                if now != told:
                    yield now
                    told = now
                elif self._is_stopping:
                    raise Unavailable("the server is stopping")
                else:
                    await asyncio.shield(change)
        finally:
            self._watching -= Counter((asked,))

    def _next_change(self) -> asyncio.Future[None]:
        """Return what is done once there is something to tell."""
        loop = asyncio.get_running_loop()
        if self._change is None:
            self._change = loop.create_future()
        if not self.looks_at_a_time:
            self.looks_at_a_time = 1
            self._told = self._now()
            loop.call_later(LOOK_AGAIN_S, self._look)
        return self._change

    def _look(self) -> None:
        self.looks_at_a_time = 0
        if self._now() != self._told:
            self._tell()
        if self._watching and not self._is_stopping:
            self._next_change()

    def _tell(self) -> None:
        change, self._change = self._change, None
        if change is not None:
            change.set_result(None)

    def _now(self) -> dict[str, bytes]:
        return {asked: self._status(asked) for asked in self._watching}

    def _status(self, asked: str) -> bytes:
        is_ready = self._is_ready() if asked in self._services else self._is_model_ready(asked)
        if is_ready is None:
            return _UNKNOWN
        is_serving = is_ready and not self._is_stopping
        return _Answer(status=_Answer.SERVING if is_serving else _Answer.NOT_SERVING).SerializeToString()


def _asked(data: bytes) -> str:
    service: str = MESSAGES.parsed("HealthCheckRequest", data).service
    if len(service) > MAX_NAME:
        raise InvalidRequest(f"service: expected at most {MAX_NAME} characters, got {len(service)}")
    return service


async def _first_asked(messages: AsyncIterator[bytes]) -> str:
    """Return what is watched; the message, which may be long, is not kept meanwhile."""
    data = await anext(messages, None)
    if data is None:
        raise InvalidRequest("nothing was asked for")
    return _asked(data)
