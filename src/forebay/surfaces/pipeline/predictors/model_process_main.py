# SPDX-License-Identifier: Apache-2.0
"""The process that answers for a model; `hosting` starts it and says on its standard input what to load.

Run as `python -P -m forebay.surfaces.pipeline.predictors.model_process_main`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from forebay.errors import ConfigError, ForebayError, InvalidRequest
from forebay.remotes.servers import MAX_ANSWER_BYTES
from forebay.runtimes.signature import LOD
from forebay.surfaces.pipeline import logs
from forebay.surfaces.pipeline.codes import err_of
from forebay.surfaces.pipeline.predictors import general_model
from forebay.surfaces.pipeline.predictors.model_client import Predictor, numbered
from forebay.surfaces.pipeline.predictors.model_processes import WRONG, AtWork
from forebay.surfaces.pipeline.predictors.settings import LocalConf
from forebay.surfaces.pipeline.predictors.watching import watch_of, watched_client
from forebay.types.failures import failure_of, text_of
from forebay.types.first_use import known
from forebay.workers.parent_death import end_with
from forebay.workers.user_code import caught


class _Server(ThreadingHTTPServer):
    """Answers for one model, one request at a time; a thread for each connection."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, model: Predictor) -> None:
        super().__init__(("127.0.0.1", 0), _Exchange, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_address = listener.getsockname()
        self.server_name, self.server_port = "localhost", self.server_address[1]
        self._model = model
        self._running = threading.Lock()
        self._calls = 0
        self._began: float | None = None

    def answer(self, body: bytes) -> bytes:
        """Answer a request of the general model service."""
        try:
            found = self._predict(body)
        except (ForebayError, msgspec.DecodeError, RecursionError) as problem:
            if not isinstance(problem, ForebayError):
                problem = InvalidRequest(f"the body cannot be read: {problem}")
            told = err_of(numbered(problem))
            found = general_model.GeneralResponse(err_no=told.err_no, err_msg=told.text)
        return msgspec.json.encode(found)

    def at_work(self) -> bytes:
        """Tell which call the model is in, for who doubts that it ends."""
        began = self._began
        return msgspec.json.encode(AtWork() if began is None else AtWork(self._calls, time.monotonic() - began))

    def _predict(self, body: bytes) -> general_model.GeneralResponse:
        request = msgspec.json.decode(body, type=known(general_model.GeneralRequest))
        feed: dict[str, Any] = {}
        for tensor in request.tensor:
            name, value = tensor.alias_name or tensor.name, general_model.unpack(tensor)
            feed[name] = value.array
            if value.lod is not None:
                feed[name + LOD] = value.lod
        with self._running:
            self._calls += 1
            self._began = time.monotonic()
            try:
                found = self._model.predict(feed, request.fetch_var_names, log_id=int(request.log_id))
            finally:
                self._began = None
        return general_model.GeneralResponse([general_model.Output(general_model.pack_all(found))])


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        self._answer(self.server.at_work())

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path != general_model.PATH:
            self.send_error(404)
        elif not length.isdecimal():
            self.send_error(411)
        elif int(length) > MAX_ANSWER_BYTES:
            self.send_error(413)
        else:
            assert isinstance(self.server, _Server)
            self._answer(self.server.answer(self.rfile.read(int(length))))

    def _answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet: the caller logs."""


def main() -> int:
    """Be the process; returns its exit status."""
    said = sys.stdin.buffer.readline()
    if not said:
        return 1  # who started it is gone already
    order: Any = json.loads(said)
    if not end_with(order["server"]):
        return 1
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    sys.path.extend(folder for folder in order["path"] if folder not in sys.path)
    logs.to_stderr("info")
    conf = msgspec.convert(order["conf"], known(LocalConf))
    model, problem = caught(watched_client, conf, (), order["index"], watch_of("a model's process", conf))
    if problem is not None:
        told = failure_of(problem).error
        reason = WRONG + told.message if isinstance(told, ConfigError) else text_of(problem)
        out.write(" ".join(reason.split()).encode() + b"\n")
        return 1
    server = _Server(socket.socket(fileno=order["socket"]), model)
    out.write(b"ready\n")
    out.close()
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
