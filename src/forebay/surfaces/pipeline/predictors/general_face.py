# SPDX-License-Identifier: Apache-2.0
"""The HTTP face of the original's model servers, for scripts that ask a `LocalServiceHandler` for its ports."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from forebay.errors import ForebayError, InvalidRequest
from forebay.remote_servers.servers import MAX_ANSWER_BYTES
from forebay.runtimes.signature import LOD
from forebay.surfaces.pipeline.codes import err_of
from forebay.surfaces.pipeline.predictors import general_calls
from forebay.surfaces.pipeline.predictors.model_client import Predictor, numbered
from forebay.types.first_use import known


class GeneralModelFace(ThreadingHTTPServer):
    """Answers for one model, on a port of this machine that the system chooses; a thread for each connection."""

    daemon_threads = True

    def __init__(self, model: Predictor) -> None:
        """Open the port and answer, until it is closed."""
        super().__init__(("127.0.0.1", 0), _Exchange)
        self._model = model
        threading.Thread(target=self.serve_forever, name="forebay-model-face", daemon=True).start()

    def close(self) -> None:
        """Close the port, and the model."""
        self.shutdown()
        self.server_close()
        self._model.close()

    def answer(self, body: bytes) -> bytes:
        """Answer a request of the general model service."""
        try:
            found = self._predict(body)
        except (ForebayError, msgspec.DecodeError, RecursionError) as problem:
            if not isinstance(problem, ForebayError):
                problem = InvalidRequest(f"the body cannot be read: {problem}")
            told = err_of(numbered(problem))
            found = general_calls.GeneralResponse(err_no=told.err_no, err_msg=told.text)
        return msgspec.json.encode(found)

    def _predict(self, body: bytes) -> general_calls.GeneralResponse:
        request = msgspec.json.decode(body, type=known(general_calls.GeneralRequest))
        feed: dict[str, Any] = {}
        for tensor in request.tensor:
            name, value = tensor.alias_name or tensor.name, general_calls.unpack(tensor)
            feed[name] = value.array
            if value.lod is not None:
                feed[name + LOD] = value.lod
        found = self._model.predict(feed, request.fetch_var_names, log_id=int(request.log_id))
        return general_calls.GeneralResponse([general_calls.Output(general_calls.pack_all(found))])


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path != general_calls.PATH:
            self.send_error(404)
        elif not length.isdecimal():
            self.send_error(411)
        elif int(length) > MAX_ANSWER_BYTES:
            self.send_error(413)
        else:
            assert isinstance(self.server, GeneralModelFace)
            data = self.server.answer(self.rfile.read(int(length)))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet: the caller logs."""
