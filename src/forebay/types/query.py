# SPDX-License-Identifier: Apache-2.0
"""The parameters of a query string."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl

from forebay.errors import InvalidRequest

MAX_PARAMETERS: Final = 100


def query_parameters(query: bytes, encoding: str) -> list[tuple[str, str]]:
    """Return names and values in their order; raises an `InvalidRequest` if they are too many or cannot be read."""
    if (count := query.count(b"&") + 1) > MAX_PARAMETERS:
        raise InvalidRequest(f"the query: expected at most {MAX_PARAMETERS} parameters, got {count}")
    try:
        return parse_qsl(query.decode(encoding), keep_blank_values=True, errors="strict")
    except ValueError as error:
        raise InvalidRequest(f"the query cannot be read: {error}") from error
