# SPDX-License-Identifier: Apache-2.0
"""Owns a gRPC port: binds it, hands the bytes of each call to its service, and closes without losing a call."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from forebay.errors import Code, ConfigError, ForebayError, UserCodeError
from forebay.transports.binding import why_not
from forebay.transports.http.exchange import key_is_known

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grpc

    from forebay.transports.grpc.service import GrpcConfig, GrpcService, Handler

log = logging.getLogger("forebay.requests")


class GrpcListener:
    """A gRPC server on one port, with the standard health and reflection services beside those it is given.

    Attributes:
        address: Host and port, once it is started.
    """

    def __init__(self, config: GrpcConfig, services: Sequence[GrpcService], is_ready: Callable[[], bool]) -> None:
        """Describe the listener; `start` binds it.

        Args:
            config: The port.
            services: What is served there.
            is_ready: What the health service tells: whether calls can be answered now.
        """
        self.address: tuple[str, int] | None = None
        self._config = config
        self._services = services
        self._is_ready = is_ready
        self._is_stopping = False
        self._server: Any = None

    async def start(self) -> tuple[str, int]:
        """Bind and accept; returns the address.

        Raises:
            ConfigError: If the address cannot be bound, the TLS files cannot be used, or grpcio is not installed.
        """
        # Workers are started by fork and exec, which gRPC's preparations for a fork would only stop and start again.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
        try:
            import grpc
            from grpc_reflection.v1alpha import reflection

            from forebay.transports.grpc.health import SERVICE, Health
        except ImportError as error:
            msg = f"the gRPC port needs {error.name}, which is not installed: pip install 'forebay[grpc]'"
            raise ConfigError(msg) from error
        config = self._config
        names = [service.full_name for service in self._services]
        health = Health(names, lambda: not self._is_stopping and self._is_ready())
        self._server = grpc.aio.server(
            interceptors=[_key_check(config.api_keys, SERVICE)] if config.api_keys else None,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_send_message_length", config.max_message_bytes),
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_concurrent_streams", config.max_calls),
            ],
            maximum_concurrent_rpcs=config.max_calls,
        )
        self._server.add_generic_rpc_handlers([_generic_handler(service) for service in self._services])
        self._server.add_generic_rpc_handlers([health.handler()])
        described = [*names, SERVICE, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(described, self._server, pool=_pool(self._services))
        port = self._bind(grpc)
        await self._server.start()
        self.address = config.host, port
        return self.address

    def _bind(self, grpc: Any) -> int:
        config = self._config
        if not 0 <= config.port < 1 << 16:
            msg = f"port {config.port} is not possible; a number from 0 to 65535 is needed"
            raise ConfigError(msg)
        # gRPC logs why it cannot bind and then only says that it cannot: ask first.
        try:
            _try_to_bind(config.host, config.port)
        except OSError as error:
            raise ConfigError(why_not(config.host, config.port, error)) from error
        shown = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{shown}:{config.port}"
        try:
            if config.certfile:
                return self._server.add_secure_port(address, _credentials(grpc, config))
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            msg = f"{address} cannot be bound: {error}"
            raise ConfigError(msg) from error

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more, answer what was sent, end every call within `grace_s` seconds."""
        self._is_stopping = True
        if self._server is None:
            return
        try:
            await self._server.stop(grace_s)
        except asyncio.CancelledError:
            await self._server.stop(None)
            raise


def _generic_handler(service: GrpcService) -> grpc.GenericRpcHandler:
    import grpc

    methods: dict[str, Any] = {}
    for name, handler in service.methods.items():
        methods[name] = grpc.unary_unary_rpc_method_handler(_guarded(name, handler))
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _guarded(name: str, handler: Handler) -> Any:
    """Wrap a method so that its errors become statuses and nothing else of them reaches the client."""
    import grpc

    statuses = {code: grpc.StatusCode[code.name] for code in Code}

    async def guarded(data: bytes, context: Any) -> bytes:
        try:
            return await handler(data, context)
        except UserCodeError:  # whoever ran that code has logged it
            await context.abort(grpc.StatusCode.INTERNAL, "the model failed; the server's log says why")
        except ForebayError as error:
            await context.abort(statuses[error.code], error.message)
        except Exception:
            log.exception("%s failed", name)
            await context.abort(grpc.StatusCode.INTERNAL, "the server failed; its log says why")
        return b""  # abort() has raised

    return guarded


def _key_check(keys: Sequence[str], public: str) -> Any:
    """Return an interceptor that asks for an API key wherever one is needed."""
    import grpc

    known = [key.encode() for key in keys]

    async def refuse(_request: Any, context: Any) -> None:
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED, "an API key is needed, as x-api-key or as authorization: Bearer"
        )

    refusal: Any = refuse
    refused = cast("Any", grpc.unary_unary_rpc_method_handler(refusal))

    class KeyCheck(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
            if handler_call_details.method.startswith(f"/{public}/"):
                return await continuation(handler_call_details)
            for name, value in handler_call_details.invocation_metadata:
                if name in {"x-api-key", "authorization"}:
                    given = value if isinstance(value, bytes) else value.encode()
                    if key_is_known(known, given):
                        return await continuation(handler_call_details)
            return refused

    return KeyCheck()


def _pool(services: Sequence[GrpcService]) -> Any:
    """Return the descriptors of all services, in a pool of their own."""
    from google.protobuf import descriptor_pb2, descriptor_pool
    from grpc_health.v1 import health_pb2
    from grpc_reflection.v1alpha import reflection_pb2

    pool: Any = descriptor_pool.DescriptorPool()
    files = list(dict.fromkeys(file for service in services for file in service.files))
    files += [health_pb2.DESCRIPTOR.serialized_pb, reflection_pb2.DESCRIPTOR.serialized_pb]
    for file in files:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
    return pool


def _try_to_bind(host: str, port: int) -> None:
    """Bind an address for a moment.

    Raises:
        OSError: If it cannot be had.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)


def _credentials(grpc: Any, config: GrpcConfig) -> Any:
    assert config.certfile is not None
    keyfile = config.keyfile or config.certfile
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.certfile, keyfile)
        chain, key = Path(config.certfile).read_bytes(), Path(keyfile).read_bytes()
    except OSError as error:
        msg = f"the TLS files {config.certfile} and {keyfile} cannot be used: {error.strerror or error}"
        raise ConfigError(msg) from error
    return grpc.ssl_server_credentials([(key, chain)])
