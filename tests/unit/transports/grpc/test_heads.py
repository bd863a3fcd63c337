# SPDX-License-Identifier: Apache-2.0
"""What a client is told of a head that leads nowhere."""

from __future__ import annotations

import pytest

from forebay.transports.grpc.heads import HeadReader, Method
from forebay.transports.grpc.statuses import Status

PATHS = (
    "/inference.GRPCInferenceService/ModelInfer",
    "/inference.GRPCInferenceService/ModelReady",
    "/grpc.health.v1.Health/Check",
)
SERVICES = "grpc.health.v1.Health, inference.GRPCInferenceService"


def head_of(path):
    reader = HeadReader({one.encode(): Method(lambda *_: None) for one in PATHS}, (), 1 << 16)
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b"content-type", b"application/grpc")]
    return reader.read(fields, 100)


@pytest.mark.parametrize(
    "path, told",
    [
        (
            b"/inference.GRPCInferenceService/ModelInfr",
            "the service inference.GRPCInferenceService has no method 'ModelInfr'; did you mean 'ModelInfer'?",
        ),
        (
            b"/inference.GRPCInferenceService/Predict",
            "the service inference.GRPCInferenceService has no method 'Predict'; there is ModelInfer, ModelReady",
        ),
        (
            b"/inference.GRPCInferenceServise/ModelInfer",
            "there is no service 'inference.GRPCInferenceServise' here; did you mean 'inference.GRPCInferenceService'?",
        ),
        (
            b"/GRPCInferenceService/ModelInfer",
            "there is no service 'GRPCInferenceService' here; did you mean 'inference.GRPCInferenceService'?",
        ),
        (b"/a.B/C", f"there is no service 'a.B' here; there is {SERVICES}"),
        (b"/ModelInfer", "the path '/ModelInfer' names no method; /SERVICE/METHOD is needed"),
        (b"/", "the path '/' names no method; /SERVICE/METHOD is needed"),
        (b"/\xff/\xfe", f"there is no service '\N{REPLACEMENT CHARACTER}' here; there is {SERVICES}"),
        (b"/" + b"x" * 5000 + b"/y", f"there is no service '{'x' * 100}' here; there is {SERVICES}"),
    ],
)
def test_a_method_that_there_is_not_is_told_with_what_was_meant(path, told):
    head = head_of(path)
    assert (head.status, head.reason) == (Status.UNIMPLEMENTED, told)
