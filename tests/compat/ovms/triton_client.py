# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""What tritonclient and ovmsclient do with graphs, over gRPC and HTTP; run in an environment of its own.

    python triton_client.py GRPC-ADDRESS HTTP-ADDRESS FOLDER

Each function with an O number is one check; a line of JSON tells how it went. `test_triton_client.py` has the server.
"""

import functools
import gc
import itertools
import json
import os
import queue
import re
import struct
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tritonclient.grpc as tg
import tritonclient.http as th
from tritonclient.utils import InferenceServerException

STAMP = "OVMS_MP_TIMESTAMP"
PATIENCE_S = 60
TYPES = ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64", "BOOL"]
DTYPES = dict(zip(TYPES, ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "?"], strict=True))

GRPC, HTTP, FOLDER = "", "", Path()


class Stream:
    def __init__(self, model):
        self.client = tg.InferenceServerClient(GRPC)
        self.model = model
        self.answers = queue.Queue()
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.end()

    def send(self, *tensors, model=None, version="", id="", final=False, stamp=None, **parameters):
        if stamp is not None:
            parameters[STAMP] = stamp
        self.client.async_stream_infer(
            model or self.model,
            list(tensors),
            model_version=version,
            request_id=id,
            parameters=parameters or None,
            enable_empty_final_response=final,
        )

    def say(self, content, name="input", **more):
        """Sends a text as the original's first example does: its bytes, as many as the shape says."""
        self.send(raw(content, name=name), **more)

    def take(self):
        """The content of the next answer, and the whole of it."""
        result, error = self.answers.get(timeout=PATIENCE_S)
        assert error is None, error
        response = result.get_response()
        assert len(response.outputs) == len(response.raw_output_contents) <= 1  # O77
        return (response.raw_output_contents or [None])[0], response

    def error(self):
        result, error = self.answers.get(timeout=PATIENCE_S)
        assert result is None, result.get_response()
        return error

    def end(self, **more):
        self.client.stop_stream(**more)
        self.client.close()


def raw(content, datatype="BYTES", shape=None, name="input"):
    given = tg.InferInput(name, [len(content)] if shape is None else shape, datatype)
    given._raw_content = content
    return given


def numbers(array, name="input", datatype=None):
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    given = tg.InferInput(name, list(array.shape), datatype or names[array.dtype])
    given.set_data_from_numpy(array)
    return given


def typed(datatype, shape, *, name="input", **contents):
    given = tg.InferInput(name, shape, datatype)
    for field, values in contents.items():
        getattr(given._input.contents, f"{field}_contents").extend(values)
    return given


def infer(model, *tensors, **more):
    with tg.InferenceServerClient(GRPC) as client:
        return client.infer(model, list(tensors), **more)


def content(result, at=0):
    return result.get_response().raw_output_contents[at]


def refused(call, *asked, kind=InferenceServerException, **more):
    try:
        call(*asked, **more)
    except kind as error:
        return error
    raise AssertionError("it was not refused")


def refusal(status, told, model, *tensors, **more):
    error = refused(infer, model, *tensors, **more)
    assert error.status() == f"StatusCode.{status}", error
    assert re.search(told, error.message()), error
    return error


def stamp_of(response):
    return response.parameters[STAMP].int64_param


def until(check, what):
    end = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def server_and_graphs_tell_of_themselves():  # O109, O118, O119, O120, O121, O124, O136, O142, O143
    with tg.InferenceServerClient(GRPC) as client, th.InferenceServerClient(HTTP) as other:
        for one in (client, other):
            assert one.is_server_live()
            assert one.is_server_ready()
            assert one.is_model_ready("echo")
            assert not one.is_model_ready("broken")
        about = client.get_model_metadata("echo")
        assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in about.inputs] == [
            ("input", "INVALID", [])
        ]
        assert list(about.versions) == ["1"]
        about = other.get_model_metadata("typed")
        assert about["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1]}]
        assert "statistics" in other.get_server_metadata()["extensions"]
        assert client.get_model_config("count").config.model_transaction_policy.decoupled
        assert refused(client.is_model_ready, "nobody").status() == "StatusCode.NOT_FOUND"
        error = refused(client.get_model_metadata, "broken")
        assert error.status() == "StatusCode.UNAVAILABLE", error
        assert "broken/graph.pbtxt:1" in error.message()
    began = time.monotonic()
    refusal("UNAVAILABLE", "broken/graph.pbtxt:1", "broken", raw(b"x"))
    assert time.monotonic() - began < PATIENCE_S / 2


def names_of_nodes_and_unknown_graphs_are_not_found():  # O116, O122
    for name in ("nobody", "n", "echo/n"):
        assert refused(infer, name, raw(b"x")).status() == "StatusCode.NOT_FOUND"


def versions_of_graphs_are_ignored():  # O117, O139
    for version in ("", "1", "7"):
        response = infer("echo", raw(b"x"), model_version=version).get_response()
        assert (response.model_name, response.model_version) == ("echo", "1")


def every_type_comes_and_goes():  # O27, O33, O40, O97
    for name, dtype in DTYPES.items():
        array = np.array([[0, 1], [1, 0]], dtype)
        result = infer("plus", numbers(array))
        np.testing.assert_array_equal(result.as_numpy("output"), (array + np.ones((), dtype)).astype(dtype))
        assert result.get_response().outputs[0].datatype == name
    with th.InferenceServerClient(HTTP) as client:
        given = th.InferInput("input", [2], "INT64")
        given.set_data_from_numpy(np.array([2**53 + 1, -1]))
        np.testing.assert_array_equal(client.infer("plus", [given]).as_numpy("output"), [2**53 + 2, 0])


def sizes_that_are_not_those_of_the_shape_are_refused():  # O33
    for name, dtype in DTYPES.items():
        size = np.dtype(dtype).itemsize
        for length in (3 * size - 1, 3 * size + 1, 0):
            refusal("INVALID_ARGUMENT", f"expected {3 * size} bytes", "echo", raw(b"x" * length, name, [3]))
    for shape in ([10**7] * 4, [2**62, 5], [2**63 - 1, 1]):
        refusal("INVALID_ARGUMENT", "shape|bytes", "echo", raw(b"", "FP32", shape))
        refusal("INVALID_ARGUMENT", "shape|elements", "echo", typed("FP32", shape, fp32=[1.0]))


def shapes_without_axes_or_elements_go_through():  # O38
    assert infer("plus", numbers(np.array(3, np.float32))).as_numpy("output") == 4
    for shape in ([1, 32, 32, 0, 1], [0]):
        response = infer("plus", raw(b"", "FP32", shape)).get_response()
        assert (list(response.outputs[0].shape), response.raw_output_contents[0]) == (shape, b"")
    refusal("INVALID_ARGUMENT", r"\[-1\]", "echo", raw(b"", "FP32", [-1]))


def typed_contents_come_and_raw_ones_go():  # O37, O40
    for datatype, contents in {
        "BOOL": {"bool": [True, False]},
        "INT8": {"int": [-1, 3]},
        "INT16": {"int": [-1, 3]},
        "INT32": {"int": [-1, 3]},
        "INT64": {"int64": [-1, 2**60]},
        "UINT8": {"uint": [1, 255]},
        "UINT16": {"uint": [1, 3]},
        "UINT32": {"uint": [1, 3]},
        "UINT64": {"uint64": [1, 2**63]},
        "FP32": {"fp32": [0.5, 3]},
        "FP64": {"fp64": [0.5, 1e-300]},
    }.items():
        response = infer("echo", typed(datatype, [2], **contents)).get_response()
        assert not response.outputs[0].HasField("contents")
        (values,) = contents.values()
        assert np.frombuffer(response.raw_output_contents[0], DTYPES[datatype]).tolist() == values
        refusal("INVALID_ARGUMENT", "'input'", "echo", typed(datatype, [3], **contents))
    refusal("INVALID_ARGUMENT", "FP16", "echo", typed("FP16", [1], fp32=[1.0]))


def as_many_raw_contents_as_inputs_or_none():  # O39
    two = [typed("FP32", [1], fp32=[1.0]), raw(b"x", name="other")]
    refusal("INVALID_ARGUMENT", "raw|contents", "default", *two)


def texts_are_framed_and_raw_bytes_are_not():  # O35, O36, T4
    texts = typed("BYTES", [3], bytes=[b"abc", b"", "é".encode()])
    assert content(infer("echo", texts)) == b"\3\0\0\0abc\0\0\0\0\2\0\0\0" + "é".encode()
    result = infer("told", raw(b"unframed"))
    assert json.loads(content(result)) == [["input", "BYTES", [8], "B", [8], 8]]
    with th.InferenceServerClient(HTTP) as client:
        given = th.InferInput("input", [2], "BYTES")
        given.set_data_from_numpy(np.array([b"abc", b"\0"], object), binary_data=False)
        result = client.infer("echo", [given], outputs=[th.InferRequestedOutput("output", binary_data=False)])
        assert result.get_output("output")["data"] == ["abc", "\0"]


def types_of_ones_own_go_through_raw():  # O34
    assert json.loads(content(infer("told", raw(b"x" * 23, "my_string", [3])))) == [
        ["input", "my_string", [3], "B", [23], 23]
    ]
    outputs = infer("echo", raw(b"x" * 23, "my_string", [3])).get_response().outputs[0]
    assert (outputs.datatype, list(outputs.shape)) == ("my_string", [3])
    refusal("INVALID_ARGUMENT", "my_string", "echo", typed("my_string", [1], bytes=[b"a"]))


def arrays_of_any_layout_go_row_by_row():  # O31, O28, O30, T3
    found = infer("layouts", raw(b"x"))
    for name, wanted in {
        "strided": np.arange(10)[::2],
        "reversed": np.arange(4)[::-1],
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "fortran": np.arange(6, dtype=np.int16).reshape(2, 3),
        "middle": np.arange(24, dtype=np.uint8).reshape(2, 3, 4)[:, 1:, ::2],
        "broadcast": np.broadcast_to(np.float64(7), (2, 2)),
        "empty": np.zeros((0,), np.uint8),
    }.items():
        np.testing.assert_array_equal(found.as_numpy(name), wanted, err_msg=name)
        assert found.as_numpy(name).dtype == wanted.dtype  # O28: int64 is INT64


def inputs_are_sorted_by_tag_and_told_by_name():  # O3, O54, T1, T2
    order = infer("sorted", *(raw(name.encode(), name=name) for name in ("in2", "in1", "in10")))
    told = json.loads(content(order))
    assert told == {"order": ["in1", "in10", "in2"], "input_names": ["in10", "in2", "in1"], "output_names": ["output"]}


def outputs_come_in_the_order_of_the_file():  # O75, O128
    response = infer("many", raw(b"1")).get_response()
    assert [one.name for one in response.outputs] == ["c", "a", "b"]
    result = infer("many", raw(b"1"), outputs=[tg.InferRequestedOutput("b"), tg.InferRequestedOutput("c")])
    assert [one.name for one in result.get_response().outputs] == ["b", "c"]
    refusal("INVALID_ARGUMENT", "no output 'd'", "many", raw(b"1"), outputs=[tg.InferRequestedOutput("d")])


def an_output_that_never_came_is_named():  # O65
    refusal("INVALID_ARGUMENT", "written the output 'a'", "many", raw(b"only c"))


def inputs_are_checked_before_anything_runs():  # O89, T17
    before = json.loads(content(infer("counts", raw(b"0"))))
    for asked in ([], [raw(b"1", name="inptu")], [raw(b"1"), raw(b"1")], [raw(b"1"), raw(b"1", name="more")]):
        assert refused(infer, "counts", *asked).status() == "StatusCode.INVALID_ARGUMENT"
    assert json.loads(content(infer("counts", raw(b"0")))) == before + 1
    refusal("INVALID_ARGUMENT", "not all input packets came: 'other'", "default", raw(b"1"))


def an_error_is_of_its_request_alone():  # O13, O14, O88
    refusal("INVALID_ARGUMENT", "node 'n': ValueError: bad pixel", "echo", raw(b"bad"))
    assert content(infer("echo", raw(b"good"))) == b"good"
    for what in ("none", "number", "bare", "mixed", "unknown", "twice", "generator"):  # O15, O16, O17
        refusal("INVALID_ARGUMENT", "node 'n'", "returns", raw(what.encode()))
    assert content(infer("returns", raw(b"good"))) == b"good"


def requests_wait_for_each_other_nowhere():  # O11
    with ThreadPoolExecutor(4) as threads:  # each waits until all four are inside
        results = list(threads.map(lambda _: content(infer("together", raw(b"4"))), range(4)))
    assert results == [b"4"] * 4


def parameters_are_side_packets_or_reserved():  # O90, O91, O92, O137, T7
    assert content(infer("echo", raw(b"x"), priority=1, timeout=10**7, sequence_id=3)) == b"x"
    assert content(infer("echo", raw(b"x"), sequence_id="three", sequence_start=True)) == b"x"
    for value in ("text", 3, True):
        assert content(infer("side", raw(b"x"), parameters={"val": value, "more": 1})) == b"x"
    refusal("FAILED_PRECONDITION", "needs the parameter 'val'", "side", raw(b"x"))
    refusal("FAILED_PRECONDITION", "'py'", "side", raw(b"x"), parameters={"val": 1, "py": "x"})
    refusal(
        "INVALID_ARGUMENT",
        "parameter 'val': expected a string, a whole number, true or false, got 0.5",
        "side",
        raw(b"x"),
        parameters={"val": 0.5},
    )
    with Stream("side") as stream:  # of the first request only
        stream.say(b"1", val="text")
        stream.say(b"2")
        assert [stream.take()[0] for _ in range(2)] == [b"1", b"2"]
    with Stream("side") as stream:
        stream.say(b"1")
        error = stream.error()
        assert "needs the parameter 'val'" in error.message(), error


def timestamps_are_those_of_the_request_or_rise():  # O66, O67, O68, O71, T12
    assert stamp_of(infer("echo", raw(b"x"), parameters={STAMP: 43166520112}).get_response()) == 43166520112
    for bad in (2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1, "text", True):
        refusal("INVALID_ARGUMENT", STAMP, "echo", raw(b"x"), parameters={STAMP: bad})
    for good in (2**63 - 4, -(2**63) + 3):
        assert stamp_of(infer("echo", raw(b"x"), parameters={STAMP: good}).get_response()) == good
    with Stream("chain") as stream:
        for number in range(200):
            stream.say(b"%d" % number)
        stamps = [stamp_of(stream.take()[1]) for _ in range(200)]
        assert all(one < other for one, other in itertools.pairwise(stamps))
        stream.say(b"x", stamp=2**60)
        assert stamp_of(stream.take()[1]) == 2**60
        stream.say(b"x")
        assert stamp_of(stream.take()[1]) > 2**60
        stream.say(b"x", stamp=3)  # O70, O74
        stream.say(b"y")
        assert stream.error().status() == "StatusCode.INVALID_ARGUMENT"


def a_regular_graph_on_a_stream():  # O76, O77, O78, O85
    with Stream("many") as stream:
        for number in range(3):
            stream.say(b"%d" % number, id=f"s{number}", stamp=100 + number)
        got = [stream.take()[1] for _ in range(9)]
        assert sorted((stamp_of(one), one.outputs[0].name) for one in got) == [
            (100 + number, name) for number in range(3) for name in "abc"
        ]
        assert {one.id for one in got} == {"s0", "s1", "s2"}
        stream.say(b"only c")  # O65: what is there is sent
        assert stream.take()[1].outputs[0].name == "c"


def faults_of_a_request_leave_its_stream_open():  # O71, O80, O81
    with Stream("echo") as stream:
        stream.say(b"good")
        assert stream.take()[0] == b"good"
        stream.say(b"1", name="inptu")
        assert "did you mean 'input'" in stream.error().message()
        stream.send(raw(b"1", "FP32", [1]))
        assert "expected 4 bytes" in stream.error().message()
        stream.say(b"1", stamp="text")
        assert STAMP in stream.error().message()
        stream.say(b"1", model="count")
        assert "incorrect servable name" in stream.error().message()
        stream.say(b"1", version="7")
        assert "incorrect servable version" in stream.error().message()
        for version in ("", "0", "1"):
            stream.say(b"still there", version=version)
            assert stream.take()[0] == b"still there"


def an_error_of_the_graph_ends_its_stream_before_more_is_said():  # O82, O83, O74
    with Stream("echo") as stream:
        stream.say(b"good")
        assert stream.take()[0] == b"good"
        stream.say(b"bad")  # nothing follows
        error = stream.error()
        assert error.status() == "StatusCode.INVALID_ARGUMENT", error
        assert "ValueError: bad pixel" in error.message()
    with Stream("echo") as stream:
        stream.say(b"again")
        assert stream.take()[0] == b"again"
    with Stream("count") as stream:
        stream.say(b"3 then raise")
        assert [stream.take()[0] for _ in range(3)] == [b"0", b"1", b"2"]
        assert "RuntimeError: enough" in stream.error().message()


def a_stream_of_an_unknown_graph_is_told_so():  # O79
    for name, told in (("nobody", "there is no model 'nobody'"), ("broken", "broken/graph.pbtxt:1")):
        with Stream(name) as stream:
            stream.say(b"x")
            assert told in stream.error().message()


def streams_without_a_request_are_told_so_and_leave_nothing():  # O84
    for _ in range(30):
        with Stream("echo") as stream:
            pass
        error = stream.error()
        assert error.status() == "StatusCode.INVALID_ARGUMENT", error
        assert "the stream ended before its first request" in error.message()
    with Stream("echo") as stream:
        stream.say(b"x", name="nope")  # a request all the same
    assert "no input 'nope'" in stream.error().message()
    assert stream.answers.empty()
    assert content(infer("echo", raw(b"x"))) == b"x"


def generators_say_a_set_a_moment():  # O17, O18, O69, O72, O76, T20
    streams = [Stream("count") for _ in range(8)]
    for stream in streams:
        stream.say(b"20", stamp=64)
    for stream in streams:
        for step in range(20):
            said, response = stream.take()
            assert (said, stamp_of(response)) == (b"%d" % step, 64 + step)
        stream.say(b"2", stamp=100)  # a new cycle
        assert [stamp_of(stream.take()[1]) for _ in range(2)] == [100, 101]
        stream.say(b"2")  # and one whose timestamp nobody gives
        first, second = (stamp_of(stream.take()[1]) for _ in range(2))
        assert 101 < first == second - 1
        stream.end()
    with Stream("gaps") as stream:
        stream.say(b"x", stamp=10)
        assert [stamp_of(stream.take()[1]) for _ in range(2)] == [10, 13]


def images_are_rows_columns_and_channels():  # O55, O102
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    found = infer("image", numbers(pixels))
    np.testing.assert_array_equal(found.as_numpy("output"), pixels)
    np.testing.assert_array_equal(found.as_numpy("plus"), pixels + 1)
    for dtype, channels in (("f4", 2), ("f2", 4), ("i2", 1)):
        pixels = np.ones((1, 2, channels), dtype)
        np.testing.assert_array_equal(infer("image", numbers(pixels)).as_numpy("output"), pixels)
    for wrong in (np.ones((1, 2, 3, 3), "u1"), np.ones((2, 2), "u1"), np.ones((2, 2, 2), "u1")):
        refusal("INVALID_ARGUMENT", "'input' is an image: .* found UINT8", "image", numbers(wrong))
    refusal("INVALID_ARGUMENT", r"found FP32\[2,2,3\]", "image", numbers(np.ones((2, 2, 3), "f4")))
    refusal("INVALID_ARGUMENT", "found INT64", "image", numbers(np.ones((2, 2, 3), "i8")))
    with th.InferenceServerClient(HTTP) as client:
        given = th.InferInput("input", [1, 1, 3], "UINT8")
        given.set_data_from_numpy(np.ones((1, 1, 3), "u1"), binary_data=False)
        assert "binary" in refused(client.infer, "image", [given]).message()


def an_empty_output_is_there_and_any_other_is_not():  # O30, O77, T6
    results = queue.Queue()
    with tg.InferenceServerClient(GRPC) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        client.async_stream_infer("signals", [raw(b"ab")])
        ends = []
        while not ends:
            result, error = results.get(timeout=PATIENCE_S)
            assert error is None, error
            if result.as_numpy("end_signal") is not None:
                ends.append(result.as_numpy("end_signal").tolist())
            else:
                said = result.as_numpy("output")
                assert (said.dtype, said.shape) == (np.uint8, (1,))  # T5
        assert ends == [[]]
    answer = infer("told", raw(b"x"))
    assert answer.as_numpy("output").dtype == np.uint8  # T5: of bytes; a type of one's own is read raw
    assert bytes(answer.as_numpy("output")) == content(answer)


def an_item_is_sent_before_the_next_is_computed():  # O20, T11
    with Stream("gate") as stream:
        stream.say(b"x")
        assert stream.take()[0] == b"0"  # the second one waits for a file that is not there yet
        (FOLDER / "gate/open").touch()
        assert stream.take()[0] == b"1"


def new_data_for_a_node_that_generates_ends_the_stream():  # O73, T16
    with Stream("forever") as stream:
        stream.say(b"x", stamp=0)
        stream.take()
        stream.say(b"y", stamp=1)
        while True:
            result, error = stream.answers.get(timeout=PATIENCE_S)
            if error is not None:
                break
            del result
        assert "already processing data" in error.message(), error
        assert error.status() == "StatusCode.INVALID_ARGUMENT"


def one_answer_is_not_for_generators():  # O78, T13
    refusal("INVALID_ARGUMENT", "ModelStreamInfer", "count", raw(b"3"))
    assert content(infer("loop_returns", raw(b"3"))) == b"3"


def final_answers_are_told_to_who_wants_to_know():  # O87
    with Stream("count") as stream:
        stream.say(b"2", final=True)
        said = [stream.take()[1] for _ in range(3)]
        assert [one.parameters["triton_final_response"].bool_param for one in said] == [False, False, True]
        assert not said[-1].outputs
        stream.say(b"1")
        assert "triton_final_response" not in stream.take()[1].parameters


def who_has_said_all_gets_all_and_who_goes_ends_it():  # O19, T11
    stream = Stream("count")
    stream.say(b"50")
    stream.end()
    assert [stream.take()[0] for _ in range(50)][-1] == b"49"
    stream = Stream("forever")
    stream.say(b"mark")
    stream.take()
    stream.end(cancel_requests=True)
    until((FOLDER / "forever/closed").exists, "the generator was not closed")


def one_buffer_for_all_items_corrupts_none():  # O21
    with Stream("reuse") as stream:
        stream.say(b"5")
        assert [stream.take()[0] for _ in range(5)] == [bytes([step]) * 4 for step in range(5)]


def inputs_of_one_moment_come_together():  # O60, O61, O64, T28
    with Stream("default") as stream:
        stream.say(b"a", name="input", stamp=64)
        stream.say(b"b", name="other", stamp=64)
        assert stream.take()[0] == b"input other"
        stream.say(b"a", name="input", stamp=70)
        stream.say(b"b", name="other", stamp=71)  # the first cannot get company any more
        assert stream.take()[0] == b"input"
        stream.client.stop_stream()
        assert stream.take()[0] == b"other"


def requests_that_wait_for_company_keep_no_others_from_being_read():  # O61, O64
    with Stream("default") as stream:
        for stamp in range(300):
            stream.say(b"a", stamp=stamp)
        for stamp in range(300):
            stream.say(b"b", name="other", stamp=stamp)
        assert {stream.take()[0] for _ in range(300)} == {b"input other"}
    with Stream("default") as stream:
        for stamp in range(300):
            stream.say(b"a", stamp=stamp)
        stream.client.stop_stream()
        assert {stream.take()[0] for _ in range(300)} == {b"input"}
    with Stream("default") as stream:
        for stamp in range(2000):
            stream.say(b"a", stamp=stamp)
        error = stream.error()
        assert error.status() == "StatusCode.RESOURCE_EXHAUSTED", error
        assert "wait for packets on 'other'" in error.message()


def inputs_come_as_they_are_where_the_graph_says_so():  # O62, O15, T26
    with Stream("immediate") as stream:
        stream.say(b"labels", name="input")  # no answer
        for _ in range(3):
            stream.say(b"image", name="other")
            assert stream.take()[0] == b"labels image"


def a_barrier_takes_one_of_each_whatever_its_timestamp():  # O60
    with Stream("barrier") as stream:
        stream.say(b"a", name="input", stamp=1)
        stream.say(b"b", name="other", stamp=5)
        assert stream.take()[0] == b"input other"
        stream.say(b"c", name="other", stamp=6)
        stream.say(b"d", name="input", stamp=7)
        assert stream.take()[0] == b"input other"


def inputs_of_a_set_come_together():  # O63
    for is_split in (False, True):
        with Stream("sets") as stream:
            if is_split:
                stream.say(b"a", name="input", stamp=5)
                stream.say(b"b", name="other", stamp=5)
            else:
                stream.send(raw(b"a"), raw(b"b", name="other"), stamp=5)
            assert [stream.take()[0] for _ in range(2)] == [b"a", b"b"]


def converters_and_a_model_of_openvino():  # O41, O97, O99, O100, O101
    given = numbers(np.arange(3, dtype=np.float32))
    np.testing.assert_array_equal(infer("mixed", given).as_numpy("output"), [21, 22, 23])
    with Stream("mixed") as stream:
        stream.send(given)
        assert stream.take()[0] == np.array([21, 22, 23], np.float32).tobytes()
    with th.InferenceServerClient(HTTP) as client:
        asked = th.InferInput("input", [3], "FP32")
        asked.set_data_from_numpy(np.arange(3, dtype=np.float32))
        np.testing.assert_array_equal(client.infer("mixed", [asked]).as_numpy("output"), [21, 22, 23])
    np.testing.assert_array_equal(infer("add", given).as_numpy("output"), [1, 2, 3])
    assert infer("add", given).get_response().model_version == "2"  # O106
    assert refused(infer, "add", given, model_version="9").status() == "StatusCode.NOT_FOUND"  # O139
    refusal("INVALID_ARGUMENT", "float64", "mixed", numbers(np.arange(3.0)))
    refusal("FAILED_PRECONDITION", "there is no model 'nope'", "sessionless", given)  # O98
    called = infer("converted", given).get_response().outputs[0]
    assert called.name == "zzz"


def a_model_answers_streams():  # O86
    with Stream("add") as stream:
        for number in range(3):
            stream.send(numbers(np.array([number], np.float32)), id=str(number))
        got = {}
        for _ in range(3):
            said, response = stream.take()
            got[response.id] = struct.unpack("<f", said or b"")[0]
        assert got == {"0": 1, "1": 2, "2": 3}


def the_client_of_the_original_asks_a_model():  # O147: it speaks TensorFlow Serving's protocol only
    import ovmsclient

    for client in (ovmsclient.make_grpc_client(GRPC), ovmsclient.make_http_client(HTTP)):
        found = client.predict(inputs={"input": np.array([1, 2], np.float32)}, model_name="add")
        np.testing.assert_array_equal(found, [2, 3])
        assert client.get_model_status(model_name="add")[2]["state"] == "AVAILABLE"
        ask = functools.partial(client.predict, model_name="add")
        for wrong, told in (({"inptu": np.zeros(1)}, "inptu"), ({"input": np.zeros((1, 1), np.float32)}, "shape")):
            assert told in str(refused(ask, wrong, kind=ovmsclient.InvalidInputError))
        error = refused(client.predict, {"input": np.zeros(1)}, "nobody", kind=ovmsclient.ModelNotFoundError)
        assert "nobody" in str(error), error
    about = ovmsclient.make_grpc_client(GRPC).get_model_metadata(model_name="add")
    assert (about["model_version"], about["inputs"]) == (2, {"input": {"shape": [-1], "dtype": "DT_FLOAT"}})


def large_tensors_go_through():  # O130, O138, T9
    array = np.arange(4 * 1024 * 1024, dtype=np.float32)
    np.testing.assert_array_equal(infer("plus", numbers(array)).as_numpy("output"), array + 1)


def calls_may_be_packed():  # O131, O140
    given = numbers(np.zeros(1000, np.float32))
    for packing in ("gzip", "deflate"):
        np.testing.assert_array_equal(
            infer("plus", given, compression_algorithm=packing).as_numpy("output"), np.ones(1000)
        )


def a_deadline_ends_a_call_and_not_the_graph():  # O140
    error = refused(infer, "together", raw(b"never"), client_timeout=0.2)
    assert error.status() == "StatusCode.DEADLINE_EXCEEDED", error
    assert content(infer("echo", raw(b"x"))) == b"x"


def statistics_and_metrics_count():  # O132, O144
    def counted():
        with tg.InferenceServerClient(GRPC) as client:
            (stats,) = client.get_inference_statistics("many").model_stats
            return stats.inference_stats.success.count, stats.inference_stats.fail.count

    before = counted()
    infer("many", raw(b"1"))
    refused(infer, "many", raw(b"only c"))
    assert counted() == (before[0] + 1, before[1] + 1)
    with th.InferenceServerClient(HTTP) as client:
        text = client._get("metrics", None, None).read().decode()
        assert re.search(r'forebay_requests_total\{[^}]*endpoint="many"', text), text[:500]
        assert client.get_trace_settings("many")["trace_level"] == ["OFF"]  # O146
        (stats,) = client.get_inference_statistics("many")["model_stats"]
        times = stats["inference_stats"]
        assert times["fail"]["ns"] > 0
        inside = times["compute_infer"]  # what a graph computes is what happens inside
        assert inside["count"] == times["success"]["count"]
        assert abs(inside["ns"] - (times["success"]["ns"] - times["queue"]["ns"])) <= 1
        (batches,) = stats["batch_stats"]
        assert (batches["batch_size"], batches["compute_infer"]["ns"]) == (1, inside["ns"])


def graphs_are_unloaded_and_loaded():  # O12, O145
    with tg.InferenceServerClient(GRPC) as client:
        names = {one.name: one.state for one in client.get_model_repository_index().models}
        assert (names["ended"], names["broken"]) == ("READY", "UNAVAILABLE")
        client.unload_model("ended")
        until((FOLDER / "ended/ended").exists, "finalize")
        assert refused(client.infer, "ended", [raw(b"x")]).status() == "StatusCode.NOT_FOUND"
        client.load_model("ended")
        assert content(client.infer("ended", [raw(b"x")])) == b"served"
        assert refused(client.load_model, "nobody").status() in {"StatusCode.NOT_FOUND", "StatusCode.INVALID_ARGUMENT"}


def many_clients_generate_at_once():  # O76
    failures = []

    def ask(number):
        try:
            with Stream("count") as stream:
                count = 5 + number % 7
                stamp = None if number % 2 else 1000 * number
                stream.say(b"%d" % count, stamp=stamp, id=str(number))
                got = [stream.take() for _ in range(count)]
                assert [said for said, _ in got] == [b"%d" % step for step in range(count)]
                stamps = [stamp_of(response) for _, response in got]
                assert stamps == list(range(stamps[0], stamps[0] + count))
                assert stamp is None or stamps[0] == stamp
                assert {response.id for _, response in got} == {str(number)}
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failures, failures[0]


def main():
    global GRPC, HTTP, FOLDER  # noqa: PLW0603 - what the command line says
    _, GRPC, HTTP, folder = sys.argv
    FOLDER = Path(folder)
    source = Path(__file__).read_text()
    for name in re.findall(r"^def (\w+)\(\):  # O", source, re.MULTILINE):
        problem = ""
        try:
            globals()[name]()
        except BaseException:
            problem = traceback.format_exc()
        print(json.dumps([name, problem]), flush=True)
        gc.collect()
    os._exit(0)  # a stream that is still open would keep the process


if __name__ == "__main__":
    main()
