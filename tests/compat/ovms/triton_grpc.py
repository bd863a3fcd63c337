# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""What tritonclient does with graphs over gRPC; run in an environment of its own, with the address and the folder."""

import os
import queue
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import tritonclient.grpc as tg
from tritonclient.utils import InferenceServerException

STAMP = "OVMS_MP_TIMESTAMP"


class Stream:
    def __init__(self, address, model):
        self.client = tg.InferenceServerClient(address)
        self.model = model
        self.answers = queue.Queue()
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))

    def send(
        self,
        content,
        *,
        name="input",
        datatype="BYTES",
        shape=None,
        model=None,
        version="",
        id="",
        final=False,
        stamp=None,
    ):
        given = tg.InferInput(name, [len(content)] if shape is None else shape, datatype)
        given._raw_content = content
        self.client.async_stream_infer(
            model or self.model,
            [given],
            model_version=version,
            request_id=id,
            parameters=None if stamp is None else {STAMP: stamp},
            enable_empty_final_response=final,
        )

    def take(self):
        """The content of the next answer, and the whole of it."""
        result, error = self.answers.get(timeout=60)
        assert error is None, error
        response = result.get_response()
        assert len(response.outputs) == len(response.raw_output_contents)
        return (response.raw_output_contents or [None])[0], response

    def error(self):
        result, error = self.answers.get(timeout=60)
        assert result is None, result.get_response()
        return error

    def end(self, **more):
        self.client.stop_stream(**more)
        self.client.close()


def refused(call):
    try:
        call()
    except InferenceServerException as error:
        return error
    raise AssertionError("it was not refused")


def unary(address):
    with tg.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("echo")
        about = client.get_model_metadata("echo")
        assert [one.name for one in about.inputs] == ["input"]
        assert about.inputs[0].datatype == "INVALID"  # O119
        given = tg.InferInput("input", [2, 2], "FP32")
        array = np.arange(4, dtype=np.float32).reshape(2, 2)
        given.set_data_from_numpy(array)
        # Parameters that the client sends to any server (O92, O137).
        found = client.infer("echo", [given], request_id="7", priority=1, timeout=10**7, sequence_id=3)
        np.testing.assert_array_equal(found.as_numpy("output"), array)
        response = found.get_response()
        assert response.id == "7"
        assert response.parameters[STAMP].int64_param > 2**50
        # Typed contents come, raw contents go (O40).
        given._raw_content = None
        given._input.ClearField("contents")
        given._input.contents.fp32_contents.extend([1, 2, 3, 4])
        response = client.infer("echo", [given], parameters={STAMP: 5}).get_response()
        assert len(response.raw_output_contents) == 1
        assert not response.outputs[0].HasField("contents")
        assert response.parameters[STAMP].int64_param == 5  # O66
        texts = tg.InferInput("input", [3], "BYTES")
        texts._input.contents.bytes_contents.extend([b"abc", b"", "é".encode()])
        raw = client.infer("echo", [texts]).get_response().raw_output_contents[0]
        assert raw == b"\3\0\0\0abc\0\0\0\0\2\0\0\0" + "é".encode()  # O36
        own = tg.InferInput("input", [3], "my_string")
        own._raw_content = b"x" * 23
        response = client.infer("echo", [own]).get_response()
        assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == ("my_string", [3])  # O34
        bad = tg.InferInput("input", [3], "BYTES")
        bad._raw_content = b"bad"
        error = refused(lambda: client.infer("echo", [bad]))
        assert error.status() == "StatusCode.INVALID_ARGUMENT"
        assert "node 'python_node': ValueError: bad pixel" in error.message()  # O14
        assert client.infer("echo", [own])  # O13
        for name, status in (("nobody", "NOT_FOUND"), ("python_node", "NOT_FOUND")):  # O116
            assert refused(lambda name=name: client.infer(name, [own])).status() == f"StatusCode.{status}"
        numbers = tg.InferInput("input", [1], "BYTES")
        numbers._raw_content = b"3"
        error = refused(lambda: client.infer("count", [numbers]))
        assert "ModelStreamInfer" in error.message()  # O78


def regular(address):
    stream = Stream(address, "echo")
    for number in range(3):
        stream.send(b"%d" % number, id=f"s{number}", stamp=100 + number)
    for number in range(3):
        content, response = stream.take()
        assert content == b"%d" % number
        assert response.id == f"s{number}"  # O85
        assert response.parameters[STAMP].int64_param == 100 + number  # O68
    stream.send(b"1", name="inptu")  # O81
    assert "did you mean 'input'" in stream.error().message()
    stream.send(b"1", datatype="FP32", shape=[1])
    assert "needs 4 bytes" in stream.error().message()
    stream.send(b"1", model="count")  # O80
    assert "incorrect servable name" in stream.error().message()
    stream.send(b"1", version="7")
    assert "incorrect servable version" in stream.error().message()
    stream.send(b"still there", version="1")
    assert stream.take()[0] == b"still there"
    began = time.monotonic()
    stream.send(b"bad")  # O82: the client says nothing more, and is told
    error = stream.error()
    assert error.status() == "StatusCode.INVALID_ARGUMENT", error
    assert "ValueError: bad pixel" in error.message()
    assert time.monotonic() - began < 30
    stream.end()
    stream = Stream(address, "echo")  # O83
    stream.send(b"again")
    assert stream.take()[0] == b"again"
    stream.end()


def generative(address, folder):
    streams = [Stream(address, "count") for _ in range(3)]  # O76
    for stream in streams:
        stream.send(b"20", stamp=64)
    for stream in streams:
        for step in range(20):
            content, response = stream.take()
            assert content == b"%d" % step
            assert response.parameters[STAMP].int64_param == 64 + step  # O69
    for stream in streams:
        stream.end()
    stream = Stream(address, "count")  # O87
    stream.send(b"2", final=True)
    finals = [stream.take()[1] for _ in range(3)]
    assert [one.parameters["triton_final_response"].bool_param for one in finals] == [False, False, True]
    assert not finals[-1].outputs
    stream.send(b"50")
    stream.end()  # O19: what was asked is delivered
    assert [stream.take()[0] for _ in range(50)][-1] == b"49"
    stream = Stream(address, "count")
    stream.send(b"1000000000")
    stream.take()
    stream.end(cancel_requests=True)  # O19
    mark = Path(folder) / "count/closed"
    until = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < until, "the generator was not closed"
        time.sleep(0.01)


if __name__ == "__main__":
    _, where, project = sys.argv
    try:
        unary(where)
        regular(where)
        generative(where, project)
        print("served", flush=True)
    except BaseException:
        traceback.print_exc()
    os._exit(0)  # a stream that is still open would keep the process
