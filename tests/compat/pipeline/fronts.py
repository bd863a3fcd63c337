# SPDX-License-Identifier: Apache-2.0
"""Both ports of a pipeline with a stand-in for its graph, in a thread of the test."""

import asyncio
import contextlib
import math
import threading
import time

import grpc
import httpx
import msgspec
import uvloop
from tests.waiting import PATIENCE_S

from forebay.batching.queue import BatchConfig
from forebay.server.app import App
from forebay.server.config import GrpcConfig, HttpConfig
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.pipeline.dag.predictions import Predictions, client_error
from forebay.surfaces.pipeline.fronts.http import Gateway, PipelineHttp
from forebay.surfaces.pipeline.fronts.rpc import services
from forebay.surfaces.pipeline.protocol.messages import PATH, Request, Response
from forebay.transports.grpc.listener import GrpcListener
from forebay.transports.http.asgi import with_cors
from forebay.transports.http.listener import HttpListener
from forebay.transports.http.pages import ServerPages
from forebay.workers.pool import Pool

ANY_PORT = HttpConfig(port=0)
ANY_RPC_PORT = GrpcConfig()
CHANNEL = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Echo(Predictions):
    """Answers with what it was asked, or as a test tells it to."""

    def __init__(self, name="", request_class=Request, response_class=Response):
        self.name = name
        self.methods = None
        self.error_codes = "v0.7"
        self.endpoint = Endpoint(EndpointConfig(name="echo"), BatchConfig(), Pool())
        self.request_class = request_class
        self.response_class = response_class
        self.seen = []
        self.timeouts = []
        self.peers = []
        self.cancelled = threading.Event()
        self.entered = threading.Event()
        self.behave = self.echo

    def _admit(self, message, *, deadline, peer, respond, came=None, parent="", tenant=None):
        self.seen.append(message)
        left_s = deadline - time.monotonic()
        self.timeouts.append(None if left_s == math.inf else math.ceil(left_s * 2) / 2)  # some of it is over by now
        self.peers.append(peer)
        return asyncio.ensure_future(self._answer(message, respond)).cancel

    async def _answer(self, message, respond):
        try:
            found = await self.behave(message)
        except Exception as error:
            found = client_error(error)
        respond(found, None)

    async def echo(self, request):
        return self.response_class(key=request.key, value=request.value)

    async def hang(self, request):
        self.entered.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def fail(self, error):
        async def behave(request):
            raise error

        self.behave = behave

    @property
    def last(self):
        return self.seen[-1]


class Fronts:
    """The ports, open while the context is."""

    def __init__(self, inference, *, max_bytes=256 << 20, http=ANY_PORT, rpc=ANY_RPC_PORT):
        self.inference = inference
        self.is_ready = True
        app = App([])
        http = msgspec.structs.replace(http, max_body_bytes=max_bytes)
        gateway = Gateway(inference, http)
        face = PipelineHttp(gateway, http, ServerPages(app, http))
        self._http = HttpListener(http, gateway, with_cors(face, http))
        self._grpc = GrpcListener(rpc, services(inference), lambda: self.is_ready)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._closing = contextlib.ExitStack()

    def run(self, coroutine):
        """Runs a coroutine on the loop of the ports."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def __enter__(self):
        self._thread.start()
        self.host, self.http_port = self.run(self._http.start())
        _, self.grpc_port = self.run(self._grpc.start())
        self.endpoint = f"127.0.0.1:{self.grpc_port}"
        self.client = self._closing.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{self.http_port}", timeout=PATIENCE_S)
        )
        self.channel = self._closing.enter_context(grpc.insecure_channel(self.endpoint, CHANNEL))
        return self

    def __exit__(self, *_error):
        self._closing.close()
        self.run(self._http.stop(0.0))
        self.run(self.stop_grpc(0.0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def stop_grpc(self, grace_s):
        return self._grpc.stop(grace_s)

    def post(self, path, body=b"", **more):
        return self.client.post(path, content=body, **more)

    def method(self, path=PATH, channel=None):
        """The RPC with bytes in and bytes out."""
        return (channel or self.channel).unary_unary(path, request_serializer=None, response_deserializer=None)

    def call(self, request, **more):
        """One RPC with messages."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        more.setdefault("timeout", PATIENCE_S)
        return self.inference.response_class.FromString(self.method()(data, **more))


def status_of(call):
    """The status and text an RPC ends with."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), str(error.details())
    raise AssertionError("the call was answered")
