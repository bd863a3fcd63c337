# SPDX-License-Identifier: Apache-2.0
"""A model is unloaded and loaded again: `python repository.py ADDRESS`, of a server started with --manage."""

import sys
import time

import tritonclient.grpc as triton  # pyright: ignore[reportMissingImports]

client = triton.InferenceServerClient(sys.argv[1])


def state():
    (found,) = [one.state for one in client.get_model_repository_index().models if one.name == "upper"]
    return found


assert state() == "READY"
client.unload_model("upper")
until = time.monotonic() + 120
while state() == "UNLOADING" and time.monotonic() < until:
    time.sleep(0.01)
assert state() == "UNAVAILABLE"
assert not [one for one in client.get_model_repository_index().models if one.name == "upper" and one.state == "READY"]
client.load_model("upper")
assert state() == "READY"
assert client.is_model_ready("upper")
refused = None
try:
    client.load_model("upper", config="{}")
except triton.InferenceServerException as error:
    refused = error.status()
assert refused == "StatusCode.INVALID_ARGUMENT"
client.close()
