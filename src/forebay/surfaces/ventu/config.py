# SPDX-License-Identifier: Apache-2.0
"""Settings of a Ventu object: keywords, then the environment, then defaults."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

_PREFIX = "ventu_"


class Config(BaseModel):
    """What a service is called and where it listens; `ventu_NAME` in the environment, in any case, sets a field.

    Attributes:
        name: Title of the API document.
        version: Version in the API document.
        host: Address for HTTP and TCP.
        port: Port for HTTP and TCP.
        socket: Path at which the batching service listens.
    """

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)  # version=2, as the original takes it

    name: str = "Deep Learning Service"
    version: str = "latest"
    host: str = "localhost"
    port: int = Field(8000, ge=80, le=65535)
    socket: str = "batching.socket"

    def __init__(self, **given: Any) -> None:
        """Read the environment and what was given.

        Raises:
            pydantic.ValidationError: If a value is not possible or a keyword is not known.
        """
        environment = {name.lower(): value for name, value in os.environ.items()}
        found = {name: environment.get(_PREFIX + name) for name in type(self).model_fields}
        super().__init__(**{**{name: value for name, value in found.items() if value is not None}, **given})
