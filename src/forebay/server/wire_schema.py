# SPDX-License-Identifier: Apache-2.0
"""A wire type as plain data: what documents it in a process that does not have its codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.protocols.openapi_components import Documented

_REF: Final = "#/components/schemas/{name}"


class WireSchema(msgspec.Struct, frozen=True):
    """A wire type without its codec: all that is needed to document it.

    Attributes:
        raw: Whether it is bytes.
        schema: JSON Schema; references are those of an OpenAPI document.
        parts: The schemas it refers to, by name.
        has_media: Whether there are answers that bring a media type of their own.
        openai: The path at which it is asked in OpenAI's protocol; empty if there is none.
    """

    raw: bool
    schema: dict[str, Any]
    parts: dict[str, Any]
    has_media: bool = False
    openai: Annotated[str, msgspec.Meta(max_length=64)] = ""
    in_pieces: Literal[False] = False

    def json_schema(self, ref_template: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the schema and its parts, as `WireType.json_schema`."""
        return self.schema, self.parts


def wire_schema_of(documented: Documented) -> WireSchema:
    """Return a wire type as plain data; raises ConfigError if only workers of the same process can read it."""
    if documented.in_pieces:
        raise ConfigError("only workers in the server's process take bodies as they arrive (--worker-kind thread)")
    schema, parts = documented.json_schema(_REF)
    # Through JSON, so that it is equal to what arrives on the other side: keys are strings, and tuples lists.
    plain: Sequence[Any] = msgspec.json.decode(msgspec.json.encode([schema, parts], enc_hook=str))
    return WireSchema(documented.raw, *plain, has_media=documented.has_media, openai=documented.openai)
