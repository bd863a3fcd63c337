# SPDX-License-Identifier: Apache-2.0
"""Streams of tritonclient.grpc: `python streams.py ADDRESS`."""

import os
import queue
import sys
import traceback
from collections import defaultdict

import numpy as np
import tritonclient.grpc as triton  # pyright: ignore[reportMissingImports]

# A stream that is open would keep a script that has failed.
sys.excepthook = lambda *error: (traceback.print_exception(*error), sys.stderr.flush(), os._exit(1))
client = triton.InferenceServerClient(sys.argv[1])


def tensor(name, array, datatype):
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def number(value):
    return [tensor("input", np.array([value]), "INT64")]


answers = queue.Queue()
client.start_stream(callback=lambda result, error: answers.put((result, error)))


def answer():
    result, error = answers.get(timeout=120)
    assert error is None, error
    return result


def final(result):
    return result.get_response().parameters["triton_final_response"].bool_param


# A model with one answer
left = np.ones((2, 4), "f4")
client.async_stream_infer("add", [tensor("left", left, "FP32"), tensor("right", left, "FP32")], request_id="a")
found = answer()
assert found.get_response().id == "a"
assert np.array_equal(found.as_numpy("sum"), left * 2)

# A model that answers in parts, with and without a word at its end
client.async_stream_infer("count", number(3), request_id="b", enable_empty_final_response=True)
parts = [answer() for _ in range(4)]
assert [part.as_numpy("output").tolist() for part in parts[:3]] == [[0], [1], [2]]
assert [final(part) for part in parts] == [False, False, False, True]
assert parts[3].get_response().id == "b"
assert not parts[3].get_response().outputs
client.async_stream_infer("count", number(2), request_id="c")
assert [answer().as_numpy("output").tolist() for _ in range(2)] == [[0], [1]]

# An error is told at once, and the stream goes on.
client.async_stream_infer("nothing", number(1), request_id="d")
_, error = answers.get(timeout=120)
assert "there is no model 'nothing'" in error.message()
client.async_stream_infer("add", number(1), request_id="e")
_, error = answers.get(timeout=120)
assert "the model has no input 'input'" in error.message()
client.async_stream_infer("broken", number(1), request_id="f")
_, error = answers.get(timeout=120)
assert "the model failed" in error.message()
client.async_stream_infer("upper", [tensor("input", np.array([b"on"], object), "BYTES")], request_id="g")
assert answer().as_numpy("output").tolist() == [b"ON"]

# Many at a time; the answers of each are in order.
lengths = {f"many {index}": index % 7 for index in range(100)}
for name, length in lengths.items():
    client.async_stream_infer("count", number(length), request_id=name, enable_empty_final_response=True)
came = defaultdict(list)
for _ in range(sum(lengths.values()) + len(lengths)):
    found = answer()
    output = found.as_numpy("output")
    came[found.get_response().id].append(None if output is None else output.item())
assert came == {name: [*range(length), None] for name, length in lengths.items()}
client.stop_stream()
assert answers.empty()

# A deadline ends a stream; the server says so of the request if it comes before the client, which ends the call.
client.start_stream(callback=lambda result, error: answers.put((result, error)), stream_timeout=0.5)
client.async_stream_infer("slow", [tensor("input", np.array([3.0]), "FP64")])
_, error = answers.get(timeout=120)
# On a busy machine it may know before that it comes too late.
told = error.message()
assert "DEADLINE_EXCEEDED" in (error.status() or "") or "timed out after" in told or "after the deadline" in told, error
client.stop_stream()
while not answers.empty():  # after what the server says the client may say the same
    answers.get()

# And so does its client.
client.start_stream(callback=lambda result, error: answers.put((result, error)))
client.async_stream_infer("forever", number(1))
for expected in range(1000):
    assert answer().as_numpy("output").tolist() == [expected]
client.stop_stream(cancel_requests=True)
client.close()
