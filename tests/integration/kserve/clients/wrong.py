# SPDX-License-Identifier: Apache-2.0
"""What tritonclient is told of wrong inputs, over gRPC and HTTP: `python wrong.py GRPC HTTP`."""

import sys

import numpy as np
import tritonclient.grpc as over_grpc  # pyright: ignore[reportMissingImports]
import tritonclient.http as over_http  # pyright: ignore[reportMissingImports]

ROWS = np.ones((2, 4), "f4")


def tensor(kind, array=ROWS, name="left", datatype="FP32"):
    given = kind.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def cut(kind):
    given = tensor(kind)
    if kind is over_grpc:
        given._raw_content = given._raw_content[:-1]
    else:
        given._raw_data = given._raw_data[:-1]
        given._parameters["binary_data_size"] -= 1
    return given


for kind, address, statuses in (
    (over_grpc, sys.argv[1], ("INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED")),
    (over_http, sys.argv[2], ("400", "404", "413")),
):
    wrong, missing, large = statuses
    right = tensor(kind, name="right")
    with kind.InferenceServerClient(address) as client:
        for inputs, status, told in (
            ([tensor(kind, name="lefft"), right], wrong, "no input 'lefft'; did you mean 'left'?"),
            ([tensor(kind, ROWS.astype("i4"), datatype="INT32"), right], wrong, "'left': expected FP32, got INT32"),
            ([tensor(kind, ROWS[:, :3]), right], wrong, "'left': expected the shape [-1, 4], got [2, 3]"),
            ([tensor(kind, ROWS[:1]), right], wrong, "first axis counts samples, and the other inputs have 1"),
            ([cut(kind), right], wrong, "'left' of FP32[2, 4]: expected 32 bytes of data, got 31"),
            ([right, right], wrong, "input 'right' came twice"),
            ([right], wrong, "input 'left' is missing"),
            ([], wrong, "the call has no inputs; the model takes 'left', 'right'"),
            ([tensor(kind, np.ones((3 << 20, 4), "f4")), right], large, "4194304"),
        ):
            error = None
            try:
                client.infer("add", inputs)
            except kind.InferenceServerException as raised:
                error = raised
            assert error is not None, told
            assert status in error.status(), (told, error.message())
            assert told in error.message(), (told, error.message())
        for model, outputs, status, told in (
            ("ad", None, missing, "did you mean 'add'?"),
            ("add", [kind.InferRequestedOutput("sums")], wrong, "no output 'sums'"),
        ):
            error = None
            try:
                client.infer(model, [tensor(kind), right], outputs=outputs)
            except kind.InferenceServerException as raised:
                error = raised
            assert error is not None, told
            assert status in error.status(), (told, error.message())
            assert told in error.message(), (told, error.message())
        assert client.infer("add", [tensor(kind), right]).as_numpy("sum").tolist() == (ROWS * 2).tolist()
