# SPDX-License-Identifier: Apache-2.0
"""What `pack_response_package` is given: the last op's result, or the error, under the names of every version."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, cast

from forebay.errors import ForebayError
from forebay.surfaces.pipeline.codes import (
    OK,
    ChannelDataEcode,
    ChannelDataErrcode,
    CustomExceptionCode,
    ProductErrCode,
    err_of,
    to_v03,
)

__all__ = ["ChannelData", "ChannelDataEcode", "ChannelDataErrcode", "ChannelDataType", "ProductErrCode"]


class ChannelDataType(enum.Enum):
    """What a `ChannelData` holds."""

    DICT = 0
    CHANNEL_NPDATA = 1
    ERROR = 2


class ChannelData:
    """A result or an error.

    Attributes:
        id: Number of the request in this server.
        log_id: Number the client gave it.
        datatype: The value of a `ChannelDataType`.
        npdata: The result, if all of it is arrays.
        dictdata: The result, if it is not.
        error_code: A number of `CustomExceptionCode`; PRODUCT_ERROR for an error of the project's own.
        error_info: Its text.
        prod_error_code: The project's own number, or None.
        prod_error_info: Its text.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the original's signature
        self,
        datatype: int | None = None,
        npdata: Any = None,
        dictdata: Any = None,
        data_id: int | None = None,
        log_id: int | None = None,
        error_code: int | None = None,
        error_info: str | None = None,
        prod_error_code: int | None = None,
        prod_error_info: str | None = None,
    ) -> None:
        self.id = data_id
        self.log_id = log_id
        self.datatype = datatype
        self.npdata = npdata
        self.dictdata = dictdata
        self.error_code = OK if error_code is None else error_code
        self.error_info = error_info or ""
        self.prod_error_code = prod_error_code
        self.prod_error_info = prod_error_info or ""

    @classmethod
    def of(cls, outcome: Mapping[str, Any] | ForebayError, *, data_id: int, log_id: int) -> ChannelData:
        """Make one from what a graph answered: the last op's result, or the error."""
        if isinstance(outcome, ForebayError):
            told = err_of(outcome)
            found = cls(ChannelDataType.ERROR.value, data_id=data_id, log_id=log_id)
            if told.product:
                found.error_code = CustomExceptionCode.PRODUCT_ERROR.value
                found.prod_error_code, found.prod_error_info = told.err_no, told.text
            else:
                found.error_code = told.err_no
            found.error_info = told.text
            return found
        if cls.check_npdata(outcome)[0] == OK:
            return cls(ChannelDataType.CHANNEL_NPDATA.value, npdata=outcome, data_id=data_id, log_id=log_id)
        return cls(ChannelDataType.DICT.value, dictdata=outcome, data_id=data_id, log_id=log_id)

    @property
    def ecode(self) -> int:
        """The error as v0.3 numbered it, or the project's own number."""
        return to_v03(self.error_code) if self.prod_error_code is None else self.prod_error_code

    def parse(self) -> Any:
        """Return the result.

        Raises:
            TypeError: If there is none.
        """
        if self.datatype == ChannelDataType.CHANNEL_NPDATA.value:
            return self.npdata
        if self.datatype == ChannelDataType.DICT.value:
            return self.dictdata
        raise TypeError(f"Error type({self.datatype}) in datatype.")

    @staticmethod
    def check_dictdata(dictdata: Any) -> tuple[int, str | None]:
        """Return 0 and None for a dict or a list of dicts, else 7000 and the reason."""
        for one in cast("list[Any]", dictdata) if isinstance(dictdata, list) else [dictdata]:
            if not isinstance(one, dict):
                return CustomExceptionCode.TYPE_ERROR.value, f"the value of data must be dict, but get {type(one)}."
        return OK, None

    @staticmethod
    def check_npdata(npdata: Any) -> tuple[int, str | None]:
        """Return 0 and None for a dict, or a list of dicts, of arrays and lists of texts, else 7000 and the reason."""
        import numpy as np

        wrong = CustomExceptionCode.TYPE_ERROR.value
        for one in cast("list[Any]", npdata) if isinstance(npdata, list) else [npdata]:
            if not isinstance(one, Mapping):
                return wrong, f"the value of data must be dict, but get {type(one)}."
            for value in cast("Mapping[str, Any]", one).values():
                if not isinstance(value, np.ndarray) and not is_texts(value):
                    return wrong, f"the value of data must be np.ndarray, but get {type(value)}."
        return OK, None

    @staticmethod
    def check_batch_npdata(batch: Any) -> tuple[int, str | None]:
        """Return 0 and None for a list of dicts of arrays, else 7000 and the reason."""
        return ChannelData.check_npdata(list(batch))


def is_texts(value: Any) -> bool:
    """Tell whether something is a list of texts, which travels like an array."""
    if not isinstance(value, list):
        return False
    found = cast("list[Any]", value)
    return bool(found) and all(isinstance(one, str) for one in found)
