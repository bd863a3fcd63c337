# SPDX-License-Identifier: Apache-2.0
"""What a client is told of a head that leads nowhere."""

from __future__ import annotations

import asyncio

import pytest

from forebay.server.config import GrpcConfig
from forebay.transports.grpc.heads import MAX_GUESSES, HeadReader, Method
from forebay.transports.grpc.port import GrpcPort
from forebay.transports.grpc.statuses import Status

PATHS = (
    "/inference.GRPCInferenceService/ModelInfer",
    "/inference.GRPCInferenceService/ModelReady",
    "/grpc.health.v1.Health/Check",
)
SERVICES = "grpc.health.v1.Health, inference.GRPCInferenceService"


def reader_of(paths=PATHS):
    return HeadReader({one.encode(): Method(lambda *_: None) for one in paths}, (), 1 << 16)


def head_of(path, reader=None):
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b"content-type", b"application/grpc")]
    return (reader or reader_of()).read(fields, 100)


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
            "unknown service 'inference.GRPCInferenceServise'; did you mean 'inference.GRPCInferenceService'?",
        ),
        (
            b"/GRPCInferenceService/ModelInfer",
            "unknown service 'GRPCInferenceService'; did you mean 'inference.GRPCInferenceService'?",
        ),
        (b"/a.B/C", f"unknown service 'a.B'; there is {SERVICES}"),
        (b"/ModelInfer", "expected a path /SERVICE/METHOD, got '/ModelInfer'"),
        (
            b"/inference.GRPCInferenceService",
            "expected a path /SERVICE/METHOD, got '/inference.GRPCInferenceService'",
        ),
        (b"/", "expected a path /SERVICE/METHOD, got '/'"),
        (b"/\xff/\xfe", f"unknown service '\N{REPLACEMENT CHARACTER}'; there is {SERVICES}"),
        (b"/" + b"x" * 5000 + b"/y", f"unknown service '{'x' * 100}'; there is {SERVICES}"),
    ],
)
def test_a_method_that_there_is_not_is_told_with_what_was_meant(path, told):
    head = head_of(path)
    assert (head.status, head.reason) == (Status.UNIMPLEMENTED, told)


def test_what_there_is_instead_is_told_a_few_times_a_second_only():
    """It takes longer than all else that is done for such a call, the longer the more methods there are."""

    async def ask():
        reader = reader_of()
        port = GrpcPort(GrpcConfig(), reader, asyncio.get_running_loop())
        paths = [b"/inference.GRPCInferenceService/ModelInfr%d" % turn for turn in range(MAX_GUESSES + 2)]
        told = [head_of(path, reader).reason.partition("'; ")[2] for path in paths]
        port.sweep()
        port.stop()
        return told, head_of(b"/grpc.health.v1.Helth/Check", reader).reason

    told, anew = asyncio.run(ask())
    assert told == ["did you mean 'ModelInfer'?"] * MAX_GUESSES + [""] * 2
    assert anew.endswith("; did you mean 'grpc.health.v1.Health'?")
