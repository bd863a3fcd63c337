# SPDX-License-Identifier: Apache-2.0
"""Runs in the environment of the original.

    original.py serve SCRIPT [ARGUMENT...]
    original.py ask ENDPOINT... < calls.json > answers.json
    original.py model > ports.json

That is: its server with a script of the test's, its client with a test's calls, or a model that doubles numbers, in its
own messages and behind the two faces of its model servers.
"""

# pyright: reportMissingImports=false

import contextlib
import importlib.util
import io
import json
import runpy
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import numpy as np
from google.protobuf import json_format

NUMBERS = {0: "int64_data", 1: "float_data", 2: "int_data", 20: "data"}
BYTES = {5: "float16", 7: "uint8", 8: "int8"}


def prepare():
    """Leaves out what the original imports and nobody here needs: its C++ server, its compiled client."""
    name = "paddle_serving_server"
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.submodule_search_locations is not None
    package = types.ModuleType(name)
    package.__path__ = list(found.submodule_search_locations)
    client = types.ModuleType("paddle_serving_client")
    client.Client = object  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules |= {name: package, client.__name__: client}


def value_of(found):
    """A value of a call: an array stands as its elements and type."""
    return np.array(found["array"], dtype=found["dtype"]) if isinstance(found, dict) else found


def evaluated(text):
    """What old code makes of a text in an answer."""
    try:
        found = eval(text, vars(np).copy())
    except Exception:
        return None
    return [found.dtype.name, list(found.shape), found.tolist()] if isinstance(found, np.ndarray) else None


def ask(endpoints, calls):
    """Makes the calls, those with `asyn` all at once; the answers as bytes, and their arrays as old code reads them."""
    from paddle_serving_server.pipeline import PipelineClient

    client = PipelineClient()
    client.connect(endpoints)
    results = []
    with contextlib.redirect_stdout(io.StringIO()):
        for call in calls:
            feed = {name: value_of(value) for name, value in call.pop("feed").items()}
            results.append(client.predict(feed_dict=feed, **call))
        results = [found.result() if hasattr(found, "result") else found for found in results]
    return [[found.SerializeToString().hex(), [evaluated(text) for text in found.value]] for found in results]


def doubled(request, response):
    """Answers for a model that knows the types the original's C++ server reads, each where it reads it."""
    output = response.outputs.add(engine_name="general_infer_0")
    for given, name in zip(request.tensor, request.fetch_var_names, strict=True):
        made = output.tensor.add(name=f"{given.name}.out", alias_name=name, elem_type=given.elem_type)
        made.shape.extend(given.shape)
        made.lod.extend(given.lod)
        if given.elem_type in BYTES:
            dtype = BYTES[given.elem_type]
            made.tensor_content = (np.frombuffer(given.tensor_content, dtype) * 2).astype(dtype).tobytes()
        elif given.elem_type in NUMBERS:
            elements = getattr(given, NUMBERS[given.elem_type])
            getattr(made, NUMBERS[given.elem_type]).extend([one * 2 for one in elements])
        else:
            response.err_no, response.err_msg = -5100, f"elem_type {given.elem_type} is not supported"
    return response


def model():
    """Serves until its standard input ends."""
    import paddle_serving_server

    sys.path.append(str(Path(paddle_serving_server.__path__[0], "proto")))
    import general_model_service_pb2 as messages
    import general_model_service_pb2_grpc as services

    class Servicer(services.GeneralModelServiceServicer):
        def inference(self, request, context):
            return doubled(request, messages.Response(log_id=request.log_id))

    class Exchange(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json_format.Parse(self.rfile.read(int(self.headers["Content-Length"])), messages.Request())
            answer = doubled(request, messages.Response(log_id=request.log_id))
            data = json_format.MessageToJson(answer, preserving_proto_field_name=True).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format, *args):
            pass

    server = grpc.server(ThreadPoolExecutor(2))
    services.add_GeneralModelServiceServicer_to_server(Servicer(), server)
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    http = HTTPServer(("127.0.0.1", 0), Exchange)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    print(json.dumps([http.server_port, grpc_port]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    prepare()
    task, *arguments = sys.argv[1:]
    if task == "serve":
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    elif task == "ask":
        json.dump(ask(arguments, json.load(sys.stdin)), sys.stdout)
    else:
        model()
