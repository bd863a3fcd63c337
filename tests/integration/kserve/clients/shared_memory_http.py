# SPDX-License-Identifier: Apache-2.0
"""Tensors in system shared memory, with tritonclient.http: `python shared_memory_http.py ADDRESS`."""

import os
import sys

import numpy as np
import tritonclient.http as triton  # pyright: ignore[reportMissingImports]
import tritonclient.utils.shared_memory as shared  # pyright: ignore[reportMissingImports]

client = triton.InferenceServerClient(sys.argv[1])
base = f"/forebay-test-{os.getpid()}"
left = np.arange(8, dtype="f4").reshape(2, 4)


def refused(call):
    try:
        call()
    except triton.InferenceServerException as error:
        return f"{error.status()}: {error.message()}"
    raise AssertionError("the call was answered")


def asked(size=left.nbytes, region="given", output_size=left.nbytes, offset=0):
    inputs = [triton.InferInput(name, [2, 4], "FP32") for name in ("left", "right")]
    inputs[0].set_shared_memory(region, size, offset=offset)
    inputs[1].set_shared_memory("given", left.nbytes, offset=left.nbytes)
    output = triton.InferRequestedOutput("sum")
    output.set_shared_memory("taken", output_size)
    return client.infer("add", inputs, outputs=[output])


given = shared.create_shared_memory_region("given", f"{base}-given", 2 * left.nbytes)
taken = shared.create_shared_memory_region("taken", f"{base}-taken", left.nbytes)
try:
    shared.set_shared_memory_region(given, [left, left * 10])
    assert "404: there is no shared memory region 'given'" in refused(asked), refused(asked)
    client.register_system_shared_memory("given", f"{base}-given", 2 * left.nbytes)
    client.register_system_shared_memory("taken", f"{base}-taken", left.nbytes)
    assert {one["name"] for one in client.get_system_shared_memory_status()} == {"given", "taken"}

    for times in (11, 11, 12):
        shared.set_shared_memory_region(given, [left, left * (times - 1)])
        (output,) = asked().get_response()["outputs"]
        assert np.array_equal(shared.get_contents_as_numpy(taken, np.float32, [2, 4]), left * times)
        assert output["parameters"] == {
            "shared_memory_region": "taken",
            "shared_memory_byte_size": left.nbytes,
            "binary_data_size": 0,  # F86: Triton's C++ client takes no other parameters without it
        }

    # One in shared memory, the other in the body, as bytes or in JSON; the answer is in the body.
    for binary in (True, True, False):
        inputs = [triton.InferInput(name, [2, 4], "FP32") for name in ("left", "right")]
        inputs[0].set_shared_memory("given", left.nbytes)
        inputs[1].set_data_from_numpy(left, binary_data=binary)
        wanted = [triton.InferRequestedOutput("sum", binary_data=binary)]
        assert np.array_equal(client.infer("add", inputs, outputs=wanted).as_numpy("sum"), left * 2)

    assert "expected 32 bytes of data, got 31" in refused(lambda: asked(31))
    assert "it has 64" in refused(lambda: asked(offset=40))
    assert "'sum' has 32 bytes, and 16 are there" in refused(lambda: asked(output_size=16))
    assert "it has 32" in refused(lambda: asked(output_size=33))

    # Memory that has no page yet is as long as its owner says.
    os.truncate(f"/dev/shm{base}-given", 1 << 27)
    client.register_system_shared_memory("large", f"{base}-given", 1 << 27)
    large = [triton.InferInput(name, [5 << 19, 4], "FP32") for name in ("left", "right")]
    for one in large:
        one.set_shared_memory("large", 5 << 23)
    told = refused(lambda: client.infer("add", large))
    assert "413: expected at most 67108864 bytes of shared memory, got 83886080" in told, told
    client.unregister_system_shared_memory("large")

    os.truncate(f"/dev/shm{base}-given", 10)
    assert "which has 10" in refused(asked)
    os.truncate(f"/dev/shm{base}-given", 2 * left.nbytes)
    asked()

    client.unregister_system_shared_memory("given")
    assert "404" in refused(asked)
    client.unregister_system_shared_memory()
    assert client.get_system_shared_memory_status() == []
finally:
    shared.destroy_shared_memory_region(given)
    shared.destroy_shared_memory_region(taken)
client.close()
