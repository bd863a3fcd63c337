# SPDX-License-Identifier: Apache-2.0
"""The class that projects inherit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from forebay.surfaces.ventu.batch_protocol import BatchProtocol
from forebay.surfaces.ventu.config import Config
from forebay.surfaces.ventu.inference import HookFailed
from forebay.surfaces.ventu.schema import Invalid, NotPossible, Schema
from forebay.surfaces.ventu.self_serving_files import hand_over
from forebay.surfaces.ventu.service import Service
from forebay.surfaces.ventu.wsgi import WsgiApp

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logging.getLogger("ventu").addHandler(logging.NullHandler())


class Ventu:
    """A model with schemas: inherit, write the hooks, and run it over HTTP or as a worker of a batching service.

    The hooks are `preprocess` and `postprocess` for one request each, `inference` for one prepared request (HTTP) and
    `batch_inference` for a list of them (batching). Those that are not written hand on what they get.

    Example:
        >>> from pydantic import BaseModel
        >>> class Text(BaseModel):
        ...     text: str
        >>> class Length(BaseModel):
        ...     length: int
        >>> class Count(Ventu):
        ...     def batch_inference(self, batch):
        ...         return [{"length": len(item.text)} for item in batch]
        >>> Count(Text, Length).run_unix("batch.socket")  # doctest: +SKIP

    Attributes:
        req_schema: Pydantic class of a request.
        resp_schema: Pydantic class of an answer.
        use_msgpack: Whether bodies are msgpack; else they are JSON.
        req_example: The request of warm-up and health checks, from `schema_extra` in the schema's `Config`.
        resp_example: The answer it should have.
        warmup_size: Copies of the request in a warm-up batch.
        config: Name, version and addresses.
        logger: The logger `ventu.ventu`.
        metric_registry: Registry of the metrics; take it for your own.
        ventu_service: What serves; not for subclasses.
    """

    max_body_bytes: ClassVar[int] = 64 * 1024 * 1024
    """Longest body that is read over HTTP; longer ones get 413."""

    def __init__(
        self, req_schema: Any, resp_schema: Any, use_msgpack: bool = False, *_args: Any, **settings: Any
    ) -> None:
        """Read schemas and settings.

        Args:
            req_schema: Pydantic class of a request.
            resp_schema: Pydantic class of an answer.
            use_msgpack: Speak msgpack instead of JSON.
            settings: `name`, `version`, `host`, `port`, `socket`; the environment may name them too, as `ventu_port`.

        Raises:
            pydantic.ValidationError: If a setting is unknown or not possible.
            AssertionError: If there is an example of an answer and none of a request.
        """
        request, response = Schema(req_schema), Schema(resp_schema)
        if response.example and not request.example:
            have = f"{response.name} has one and {request.name} has none"
            raise NotPossible(f"require request examples if response examples are provided: {have}")
        self.req_schema = req_schema
        self.resp_schema = resp_schema
        self.use_msgpack = use_msgpack
        self.req_example = request.example
        self.resp_example = response.example
        self.warmup_size = request.batch_size
        self.config = Config(**settings)
        self.logger = logging.getLogger("ventu.ventu")
        self.ventu_service = Service(self, request, response)
        self.metric_registry: CollectorRegistry = self.ventu_service.metrics.registry
        self._app: WsgiApp | None = None
        self._sock: BatchProtocol | None = None

    def preprocess(self, data: Any) -> Any:
        """Prepare one request, an object of the request schema."""
        return data

    def inference(self, data: Any) -> Any:
        """Run one prepared request; HTTP only."""
        return data

    def batch_inference(self, batch: Any) -> Any:
        """Run a list of prepared requests and return one result for each, in order; batching only."""
        return batch

    def postprocess(self, data: Any) -> Any:
        """Make an answer that fits the response schema out of one result."""
        return data

    def health_check(self, batch: bool = False) -> bool | None:
        """Run the example, which also warms the model up.

        Returns:
            True, or None if there is no example.

        Raises:
            AssertionError: If an example does not fit its schema, or the result is not that of the example.
            Exception: What a hook raised.
        """
        if not self.req_example:
            self.logger.info("Please provide examples for inference warm-up")
            return None
        service = self.ventu_service
        if batch:
            self.logger.info("Batch inference warm-up with size: %d", self.warmup_size)
            results = service.steps.many([self._ventu_example("request") for _ in range(self.warmup_size)])
        else:
            self.logger.info("Single inference warm-up with example: %s", self.req_example)
            results = [service.steps.one(self._ventu_example("request"))]
        for result in results:
            if type(result) is HookFailed:
                raise result.error
            if self.resp_example:
                self._ventu_example("response")
                answer = service.media.plain(result)
                if answer != self.resp_example:
                    whose = f"{service.response.example_key} of {service.response.name}"
                    what = f"{self.resp_example} != {answer} for {self.req_example}"
                    raise NotPossible(f"the {whose} is not what the model answers: it does not match {what}")
        return True

    @property
    def app(self) -> WsgiApp:
        """The HTTP service as a WSGI application, for servers such as gunicorn; the first access warms the model up.

        Raises:
            AssertionError: If the result of the example is not the expected one.
        """
        if self._app is None:
            self.health_check()
            self.logger.debug("Create the WSGI application")
            self._app = WsgiApp(self.ventu_service)
        return self._app

    @property
    def sock(self) -> BatchProtocol:
        """The worker of a batching service; the first access warms the model up with a batch.

        Raises:
            AssertionError: If a result of the example is not the expected one.
        """
        if self._sock is None:
            self.health_check(batch=True)
            self.logger.debug("Create the socket worker")
            self._sock = BatchProtocol(self.ventu_service.inference)
        return self._sock

    def run_http(self, host: str | None = None, port: int | None = None, threads: int = 4) -> None:
        """Serve over HTTP until SIGTERM or SIGINT; open requests are answered first. Call it in the main thread.

        Args:
            host: Address; None takes the configured one.
            port: Port, 0 takes a free one; None takes the configured one.
            threads: Requests that run at a time.

        Raises:
            AssertionError: If the result of the example is not the expected one.
            ConfigError: If the address cannot be bound.
        """
        from forebay.surfaces.ventu.server import serve

        hand_over(self, "run_http")
        host = self.config.host if host is None else host
        port = self.config.port if port is None else port
        _ = self.app  # its first access warms the model up
        with self.ventu_service.metrics.workers.labels("http").track_inprogress():
            serve(self.ventu_service, host, port, threads)

    def run_unix(self, addr: str | None = None) -> None:
        """Work for a batching service behind a unix socket until SIGTERM; waits for it to come up, and to come back.

        Args:
            addr: Path of the socket; None takes the configured one.
        """
        hand_over(self, "run_unix")
        self._ventu_work(addr or self.config.socket, "unix")

    def run_tcp(self, host: str | None = None, port: int | None = None) -> None:
        """Work for a batching service behind a TCP port until SIGTERM; waits for it to come up, and to come back.

        Args:
            host: Where it listens; None takes the configured host.
            port: Its port; None takes the configured one.
        """
        hand_over(self, "run_tcp")
        self._ventu_work((host or self.config.host, port or self.config.port), "tcp")

    def _ventu_example(self, which: Literal["request", "response"]) -> Any:
        """Return the object that an example stands for, a new one each time."""
        schema = self.ventu_service.request if which == "request" else self.ventu_service.response
        try:
            return schema.parse(self.req_example if which == "request" else self.resp_example)
        except Invalid as error:
            msg = f"the {schema.example_key} of the {which} schema {schema.name} does not fit it: {error}"
            raise NotPossible(msg) from error

    def _ventu_work(self, addr: str | tuple[str, int], protocol: str) -> None:
        worker = self.sock
        with self.ventu_service.metrics.workers.labels(protocol).track_inprogress():
            worker.run(addr, protocol)
