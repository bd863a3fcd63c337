# SPDX-License-Identifier: Apache-2.0
"""The numbers a pipeline answers with, and how forebay's errors map to them.

Inside the server an error is an ordinary forebay error whose `detail` is `{"err_no": number, "product": bool}`, so that
it crosses threads, processes and graphs like any other. Product errors are the caller's business and are never logged
as failures of the server.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from forebay.errors import (
    BadOutcome,
    ConfigError,
    DeadlineExceeded,
    ForebayError,
    InternalError,
    InvalidRequest,
    ModelError,
    NotFound,
    RequestError,
    RunnerFailed,
    Unavailable,
    UserCodeError,
)
from forebay.types.failures import words_of


class CustomExceptionCode(enum.Enum):
    """What a pipeline answers as `err_no`."""

    OK = 0
    PRODUCT_ERROR = 50
    NOT_IMPLEMENTED = 3000
    CLOSED_ERROR = 3001
    NO_SERVICE = 3002
    INIT_ERROR = 3003
    CONF_ERROR = 4000
    INPUT_PARAMS_ERROR = 5000
    TIMEOUT = 6000
    TYPE_ERROR = 7000
    RPC_PACKAGE_ERROR = 8000
    CLIENT_ERROR = 9000
    UNKNOW = 10000
    UNKNOWN = 10000  # noqa: PIE796 - another name for it


ChannelDataErrcode = CustomExceptionCode


class ChannelDataEcode(enum.Enum):
    """The numbers of v0.3, which `channeldata.ecode` and `response.ecode` speak."""

    OK = 0
    TIMEOUT = 1
    NOT_IMPLEMENTED = 2
    TYPE_ERROR = 3
    RPC_PACKAGE_ERROR = 4
    CLIENT_ERROR = 5
    CLOSED_ERROR = 6
    UNKNOW = 7


class ProductErrCode(enum.Enum):
    """Base of a project's own error codes."""


class CustomException(Exception):
    """Raised in a hook to end the request.

    Args:
        exceptionCode: A `CustomExceptionCode`, another enum's member, or a number other than 0.
        errorMsg: What happened.
        isSendToUser: Whether the client is told both; otherwise it learns only that something failed.
    """

    def __init__(self, exceptionCode: Any, errorMsg: Any, isSendToUser: bool = False) -> None:
        super().__init__(f"\n\texception_code: {_name(exceptionCode)}\n\texception_msg: {errorMsg}")
        self.exceptionCode = exceptionCode
        self.error_code = exceptionCode
        self.error_msg = str(errorMsg)
        self.isSendToUser = isSendToUser


class Told(msgspec.Struct, frozen=True):
    """What a client is told about an error; `product` if the project's own code decided on it."""

    err_no: int
    text: str
    product: bool


OK: Final = CustomExceptionCode.OK.value
CLOSED_TEXT: Final = "dag closed."

_KINDS: Final[Mapping[int, type[ForebayError]]] = {
    CustomExceptionCode.CLOSED_ERROR.value: Unavailable,
    CustomExceptionCode.NO_SERVICE.value: NotFound,
    CustomExceptionCode.INIT_ERROR.value: ModelError,
    CustomExceptionCode.TIMEOUT.value: DeadlineExceeded,
    CustomExceptionCode.TYPE_ERROR.value: BadOutcome,
    CustomExceptionCode.RPC_PACKAGE_ERROR.value: InvalidRequest,
}
"""The kind of error behind each number; all others are failures of the user's code."""

_NUMBERS: Final[tuple[tuple[type[ForebayError], int], ...]] = (
    (DeadlineExceeded, CustomExceptionCode.TIMEOUT.value),
    (Unavailable, CustomExceptionCode.CLIENT_ERROR.value),
    (BadOutcome, CustomExceptionCode.TYPE_ERROR.value),
    (ModelError, CustomExceptionCode.INIT_ERROR.value),
    (ConfigError, CustomExceptionCode.CONF_ERROR.value),
    (NotFound, CustomExceptionCode.NO_SERVICE.value),
    (RequestError, CustomExceptionCode.RPC_PACKAGE_ERROR.value),
)
"""The number of each kind of error that does not bring its own; all others are 10000."""

_ANSWERED: Final[Mapping[int, type[ForebayError]]] = {
    CustomExceptionCode.PRODUCT_ERROR.value: InvalidRequest,
    CustomExceptionCode.CLOSED_ERROR.value: Unavailable,
    CustomExceptionCode.NO_SERVICE.value: NotFound,
    CustomExceptionCode.INPUT_PARAMS_ERROR.value: InvalidRequest,
    CustomExceptionCode.TIMEOUT.value: DeadlineExceeded,
    CustomExceptionCode.RPC_PACKAGE_ERROR.value: InvalidRequest,
    CustomExceptionCode.CLIENT_ERROR.value: Unavailable,
}
"""What answers with these numbers mean where errors have kinds; of all others that the original has nobody but the
server can be the cause, and a number of the project's own is a refusal."""

_FROM_V03: Final = {one.value: CustomExceptionCode[one.name].value for one in ChannelDataEcode}
_V03: Final = {new: old for old, new in _FROM_V03.items() if old != ChannelDataEcode.UNKNOW.value}
_V04: Final = {**_V03, CustomExceptionCode.NO_SERVICE.value: 7}
_V04_UNKNOWN: Final = 8
_V04_PRODUCT: Final = 9
_FROM_V04: Final = {old: new for new, old in _V04.items()} | {
    _V04_UNKNOWN: CustomExceptionCode.UNKNOW.value,
    _V04_PRODUCT: CustomExceptionCode.PRODUCT_ERROR.value,
}
_KNOWN: Final = frozenset(code.value for code in CustomExceptionCode)


def error(err_no: int, text: object, *, product: bool = False, is_final: bool = False, trace: str = "") -> ForebayError:
    """Make the error behind a number.

    Args:
        err_no: One of `CustomExceptionCode`, or a project's own.
        text: What the client reads; anything a project gave that every answer can carry in some form.
        is_final: Whether an op does not try again, whatever the number: `process` has ended by itself.
        trace: For the log only.
    """
    text = words_of(text)
    detail = {"err_no": err_no, "product": product} | ({"is_final": True} if is_final else {})
    kind = RequestError if product else _KINDS.get(err_no, RunnerFailed)
    if issubclass(kind, UserCodeError | ModelError):
        return kind(text, detail=detail, trace=trace)
    return kind(text, detail=detail)


def err_of(error: ForebayError, *, closing: bool = False) -> Told:
    """Return what a client is told about any error of forebay's.

    Args:
        closing: Whether the server is shutting down, which would explain that it is unavailable.
    """
    number = number_of(error)
    if number is not None:
        return Told(number, error.message, bool(error.detail.get("product")))
    if closing and isinstance(error, Unavailable):
        return Told(CustomExceptionCode.CLOSED_ERROR.value, CLOSED_TEXT, product=False)
    for kind, err_no in _NUMBERS:
        if isinstance(error, kind):
            return Told(err_no, error.message, product=False)
    return Told(CustomExceptionCode.UNKNOW.value, error.message, product=False)


def number_of(error: ForebayError) -> int | None:
    """Return the number an error brings itself, or None."""
    if not isinstance(error.detail, Mapping):
        return None
    return value_of(cast("Mapping[str, Any]", error.detail).get("err_no"))


def is_time_out(error: ForebayError) -> bool:
    """Tell whether an error says that the time of a call was over, which may be tried again."""
    number = number_of(error)
    if number is None:
        return isinstance(error, DeadlineExceeded)
    return number == CustomExceptionCode.TIMEOUT.value and not cast("Mapping[str, Any]", error.detail).get("is_final")


def error_answered(err_no: int, text: str, error_codes: str) -> ForebayError:
    """Return what an answer with an error is where errors have kinds."""
    number = _FROM_V04.get(err_no, err_no) if error_codes == "v0.4" else err_no
    kind = _ANSWERED.get(number, InternalError if number in _KNOWN else InvalidRequest)
    return kind(f"{text} (err_no {err_no})")


def value_of(code: Any, bits: int = 32) -> int | None:
    """Return a number or a member of an enum as a number; None if it is neither, or needs more than `bits` bits."""
    found = code.value if isinstance(code, enum.Enum) else code
    if isinstance(found, bool) or not isinstance(found, numbers.Integral):  # NumPy's are not an int
        return None
    number = int(found)
    return number if -(1 << bits - 1) <= number < 1 << bits - 1 else None


def to_v03(err_no: int) -> int:
    """Return the number v0.3 had for this one; a project's own codes stay."""
    return _V03.get(err_no, ChannelDataEcode.UNKNOW.value if err_no in _KNOWN else err_no)


def from_v03(ecode: int) -> int:
    """Return today's number for one of v0.3; a project's own codes stay."""
    return _FROM_V03.get(ecode, ecode)


def to_v04(err_no: int) -> int:
    """Return the number v0.4 to v0.6 had for this one; a project's own codes stay."""
    if err_no == CustomExceptionCode.PRODUCT_ERROR.value:
        return _V04_PRODUCT
    return _V04.get(err_no, _V04_UNKNOWN if err_no in _KNOWN else err_no)


def numbered(err_no: int, error_codes: str) -> int:
    """Return the number answers carry for this one, by the configuration's `error_codes`."""
    return to_v04(err_no) if error_codes == "v0.4" else err_no


def _name(code: Any) -> Any:
    return code.name if isinstance(code, enum.Enum) else code
