# SPDX-License-Identifier: Apache-2.0
"""Tensors in system shared memory, with tritonclient.grpc: `python shared_memory.py ADDRESS`."""

import os
import sys

import numpy as np
import tritonclient.grpc as triton  # pyright: ignore[reportMissingImports]
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
    assert "NOT_FOUND: there is no shared memory region 'given'" in refused(asked)
    client.register_system_shared_memory("given", f"{base}-given", 2 * left.nbytes)
    client.register_system_shared_memory("taken", f"{base}-taken", left.nbytes)
    status = client.get_system_shared_memory_status(as_json=True)["regions"]
    assert status["given"] == {"name": "given", "key": f"{base}-given", "byte_size": str(2 * left.nbytes)}

    result = asked()
    assert np.array_equal(shared.get_contents_as_numpy(taken, np.float32, [2, 4]), left * 11)
    (output,) = result.get_response().outputs
    assert output.parameters["shared_memory_region"].string_param == "taken"
    assert output.parameters["shared_memory_byte_size"].int64_param == left.nbytes

    # One in shared memory, the other in the message, which is also where the answer is.
    inputs = [triton.InferInput(name, [2, 4], "FP32") for name in ("left", "right")]
    inputs[0].set_shared_memory("given", left.nbytes)
    inputs[1].set_data_from_numpy(left)
    assert np.array_equal(client.infer("add", inputs).as_numpy("sum"), left * 2)

    assert "expected 32 bytes of data, got 31" in refused(lambda: asked(31))
    assert "it has 64" in refused(lambda: asked(offset=40))
    assert "'sum' has 32 bytes, and 16 are there" in refused(lambda: asked(output_size=16))
    assert "registered already" in refused(
        lambda: client.register_system_shared_memory("given", f"{base}-given", left.nbytes)
    )
    for key in ("/../etc/passwd", "../etc/passwd", "/", f"{base}-nothing"):
        assert "shared memory" in refused(lambda key=key: client.register_system_shared_memory("x", key, 1))
    assert "which has" in refused(lambda: client.register_system_shared_memory("x", f"{base}-taken", 1 << 30))

    assert "INVALID_ARGUMENT: bytes 0 to 33 of shared memory region 'taken'" in refused(lambda: asked(output_size=33))

    # Memory that has no page yet is as long as its owner says.
    os.truncate(f"/dev/shm{base}-given", 1 << 27)
    client.register_system_shared_memory("large", f"{base}-given", 1 << 27)
    for rows in ([1 << 23], [1 << 22, 1 << 22]):
        large = [
            triton.InferInput(name, [count, 4], "FP32") for name, count in zip(("left", "right"), rows, strict=False)
        ]
        for one, count in zip(large, rows, strict=True):
            one.set_shared_memory("large", count * 16)
        told = refused(lambda large=large: client.infer("add", large))
        assert "RESOURCE_EXHAUSTED: expected at most 67108864 bytes of shared memory, got 134217728" in told, told
    client.unregister_system_shared_memory("large")

    # Memory that its owner cuts meanwhile
    os.truncate(f"/dev/shm{base}-given", 10)
    assert "which has 10" in refused(asked)
    os.truncate(f"/dev/shm{base}-given", 2 * left.nbytes)
    asked()

    client.unregister_system_shared_memory("given")
    assert "NOT_FOUND" in refused(asked)
    client.unregister_system_shared_memory()
    assert not client.get_system_shared_memory_status().regions
finally:
    shared.destroy_shared_memory_region(given)
    shared.destroy_shared_memory_region(taken)
client.close()
