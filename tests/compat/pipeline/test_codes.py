# SPDX-License-Identifier: Apache-2.0
"""The numbers a pipeline answers with."""

from __future__ import annotations

import enum

import numpy as np
import pytest

from forebay import errors
from forebay.surfaces.pipeline import codes
from forebay.surfaces.pipeline.codes import (
    ChannelDataEcode,
    ChannelDataErrcode,
    CustomException,
    CustomExceptionCode,
    ProductErrCode,
    err_of,
)
from forebay.surfaces.pipeline.ops.channel import ChannelDataEcode as ChannelsEcode


def test_the_numbers_are_those_clients_know() -> None:  # P91
    assert {code.name: code.value for code in CustomExceptionCode} == {
        "OK": 0,
        "PRODUCT_ERROR": 50,
        "NOT_IMPLEMENTED": 3000,
        "CLOSED_ERROR": 3001,
        "NO_SERVICE": 3002,
        "INIT_ERROR": 3003,
        "CONF_ERROR": 4000,
        "INPUT_PARAMS_ERROR": 5000,
        "TIMEOUT": 6000,
        "TYPE_ERROR": 7000,
        "RPC_PACKAGE_ERROR": 8000,
        "CLIENT_ERROR": 9000,
        "UNKNOW": 10000,
    }
    assert CustomExceptionCode.UNKNOWN is CustomExceptionCode.UNKNOW
    assert ChannelDataErrcode is CustomExceptionCode


def test_v03_has_numbers_of_its_own() -> None:  # P91
    names = ("OK", "TIMEOUT", "NOT_IMPLEMENTED", "TYPE_ERROR", "RPC_PACKAGE_ERROR", "CLIENT_ERROR", "CLOSED_ERROR")
    assert [ChannelDataEcode[name].value for name in names] == list(range(7))
    assert ChannelDataEcode.UNKNOW.value == 7
    assert ChannelsEcode is ChannelDataEcode
    for name in (*names, "UNKNOW"):
        assert codes.to_v03(CustomExceptionCode[name].value) == ChannelDataEcode[name].value
        assert codes.from_v03(ChannelDataEcode[name].value) == CustomExceptionCode[name].value


@pytest.mark.parametrize(
    "err_no, old", [(0, 0), (6000, 1), (7000, 3), (9000, 5), (3001, 6), (3002, 7), (10000, 8), (5000, 8), (50, 9)]
)
def test_answers_can_carry_the_numbers_of_v04(err_no: int, old: int) -> None:  # P91
    assert codes.to_v04(err_no) == old


@pytest.mark.parametrize("own", [71, 999, 100001])
def test_a_projects_own_numbers_stay_what_they_are(own: int) -> None:  # P94
    assert codes.to_v03(own) == codes.from_v03(own) == codes.to_v04(own) == own
    found = codes.error(own, "sold out", product=True)
    assert isinstance(found, errors.RequestError)  # not logged as a failure of the server
    assert err_of(found) == codes.Told(own, "sold out", product=True)


def test_product_codes_are_made_by_extending_an_empty_enum() -> None:  # P94
    class Own(ProductErrCode):
        SOLD_OUT = 71

    assert issubclass(ProductErrCode, enum.Enum)
    assert not list(ProductErrCode)
    assert codes.value_of(Own.SOLD_OUT) == codes.value_of(71) == 71
    assert codes.value_of("71") is codes.value_of(True) is codes.value_of(None) is None


def test_numbers_of_numpy_are_codes() -> None:  # P43
    assert type(codes.value_of(np.int64(71))) is int
    assert codes.value_of(np.int64(71)) == codes.value_of(np.uint8(71)) == 71
    assert codes.value_of(np.bool_(True)) is codes.value_of(np.float32(71)) is None


@pytest.mark.parametrize("code", [code for code in CustomExceptionCode if code.value])
def test_every_number_survives_a_border(code: CustomExceptionCode) -> None:  # P91
    error = codes.error(code.value, "what happened", trace="where")
    revived = errors.revive(error.kind, error.message, error.detail, getattr(error, "trace", ""))
    assert type(revived) is type(error)
    assert err_of(revived) == codes.Told(code.value, "what happened", product=False)


@pytest.mark.parametrize(
    "error, err_no",
    [
        (errors.DeadlineExceeded("late"), 6000),
        (errors.BadOutcome("two results for three"), 7000),
        (errors.InvalidRequest("no pairs"), 8000),
        (errors.TooLarge("too large"), 8000),
        (errors.Unavailable("the worker died"), 9000),
        (errors.RunnerFailed("boom"), 10000),
        (errors.InternalError("our fault"), 10000),
        (errors.QueueFull("full"), 10000),
        (errors.NotFound("what"), 3002),
        (errors.ModelError("cannot load"), 3003),
        (errors.ConfigError("wrong"), 4000),
        (errors.RunnerFailed("detail of another kind", detail=["err_no"]), 10000),
        (errors.RunnerFailed("detail of another kind", detail={"err_no": "6000"}), 10000),
    ],
)
def test_every_error_has_a_number(error: errors.ForebayError, err_no: int) -> None:  # P92
    assert err_of(error) == codes.Told(err_no, error.message, product=False)


def test_what_a_closing_server_cannot_do_any_more_is_closed() -> None:  # P92
    assert err_of(errors.Unavailable("the server stopped"), closing=True) == codes.Told(
        3001, "dag closed.", product=False
    )
    assert err_of(errors.DeadlineExceeded("late"), closing=True).err_no == 6000
    # What brings its own number keeps it.
    assert err_of(codes.error(9000, "gone"), closing=True).err_no == 9000


@pytest.mark.parametrize(
    "err_no, error_codes, kind",
    [
        (CustomExceptionCode.TIMEOUT.value, "v0.7", errors.DeadlineExceeded),
        (codes.to_v04(CustomExceptionCode.TIMEOUT.value), "v0.4", errors.DeadlineExceeded),
        (codes.to_v04(CustomExceptionCode.NO_SERVICE.value), "v0.4", errors.NotFound),
        (codes.to_v04(CustomExceptionCode.UNKNOW.value), "v0.4", errors.InternalError),
        (codes.to_v04(CustomExceptionCode.PRODUCT_ERROR.value), "v0.4", errors.InvalidRequest),
        (71, "v0.4", errors.InvalidRequest),
    ],
)
def test_an_answer_is_an_error_of_the_kind_its_number_says(err_no: int, error_codes: str, kind: type) -> None:  # P91
    assert type(codes.error_answered(err_no, "told", error_codes)) is kind


def test_a_custom_exception_reads_well_in_a_log() -> None:  # P93
    raised = CustomException(CustomExceptionCode.INPUT_PARAMS_ERROR, "no image", True)
    assert "INPUT_PARAMS_ERROR" in str(raised)
    assert "no image" in str(raised)
    assert CustomException(71, "x").isSendToUser is False
