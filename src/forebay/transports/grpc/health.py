# SPDX-License-Identifier: Apache-2.0
"""The standard health service: every service of the port is SERVING while the app has no problem."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

SERVICE: Final = "grpc.health.v1.Health"
LOOK_AGAIN_S: Final = 0.5
"""How soon a change is told to those who watch."""


class Health:
    """Answers Check and Watch."""

    def __init__(self, services: Collection[str], is_ready: Callable[[], bool]) -> None:
        """Describe the service.

        Args:
            services: Names that may be asked for, beside the empty one.
            is_ready: Whether calls can be answered now.
        """
        self._services = {"", SERVICE, *services}
        self._is_ready = is_ready

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a server is given."""
        codec: Any = {
            "request_deserializer": health_pb2.HealthCheckRequest.FromString,
            "response_serializer": health_pb2.HealthCheckResponse.SerializeToString,
        }
        check: Any = self._check
        watch: Any = self._watch
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(check, **codec),
                "Watch": grpc.unary_stream_rpc_method_handler(watch, **codec),
            },
        )

    async def _check(self, request: Any, context: Any) -> Any:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return self._status()

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if request.service not in self._services:
            yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            return
        told: Any = None
        while True:
            now = self._status()
            if now != told:
                yield now
                told = now
            await asyncio.sleep(LOOK_AGAIN_S)

    def _status(self) -> Any:
        kinds = health_pb2.HealthCheckResponse
        return kinds(status=kinds.SERVING if self._is_ready() else kinds.NOT_SERVING)
