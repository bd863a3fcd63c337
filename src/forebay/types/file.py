# SPDX-License-Identifier: Apache-2.0
"""A file that a client sent: in a form with its name and type, or as base64 in JSON. Long ones lie on disk."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any, BinaryIO, Final, cast, final

import msgspec

NO_BASE64: Final = "Invalid base64 encoded string"
"""What msgspec says of a field of bytes, too."""


class FormPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A field or a file of a form, on its way to a worker.

    Attributes:
        name: Of the field.
        content: The bytes; the path if they lie on disk.
        filename: As the client calls it; None for a field that is not a file.
        type: The media type; empty if the client says none.
        size: Bytes on disk, -1 if they are here.
    """

    name: str
    content: bytes
    filename: str | None = None
    type: str = ""
    size: int = -1


@final
class File:
    """A file that was sent with a request; it is there until the request is answered.

    Attributes:
        filename: As the client calls it, which says nothing of where it is; None if it has no name.
        type: Its media type, as the client says; empty if it does not.
        size: In bytes.
        path: Where it lies, if it was too long to be kept in memory.
    """

    __slots__ = ("_content", "filename", "path", "size", "type")

    def __init__(
        self, content: bytes | Path, *, filename: str | None = None, type: str = "", size: int | None = None
    ) -> None:
        """Make one of bytes, or of a path; clients' are made by the server."""
        self.filename: str | None = filename
        self.type: str = type
        self.path: Path | None = content if isinstance(content, Path) else None
        self._content = b"" if isinstance(content, Path) else content
        if size is None:
            size = content.stat().st_size if isinstance(content, Path) else len(content)
        self.size: int = size

    def read(self) -> bytes:
        """Return all of it."""
        return self._content if self.path is None else self.path.read_bytes()

    def open(self) -> BinaryIO:
        """Open it for reading."""
        return io.BytesIO(self._content) if self.path is None else self.path.open("rb")

    def __repr__(self) -> str:
        return f"File({self.filename!r}, {self.type!r}, <{self.size} bytes>)"

    @classmethod
    def of(cls, part: FormPart) -> File:
        """Return a part of a form as a file."""
        if part.size < 0:
            return cls(part.content, filename=part.filename, type=part.type)
        return cls(Path(part.content.decode()), filename=part.filename, type=part.type, size=part.size)

    @classmethod
    def read_from(cls, value: Any) -> File:
        """Make a file of the value in a sample: base64 in JSON, bytes in msgpack.

        Raises:
            ValueError: If it is neither.
        """
        if isinstance(value, File):
            return value
        if isinstance(value, str):
            try:
                value = base64.b64decode(value, validate=True)
            except ValueError:
                raise ValueError(NO_BASE64) from None
        if not isinstance(value, bytes | bytearray | memoryview):
            msg = f"Expected a file in base64, got `{type(value).__name__}`"
            raise ValueError(msg)  # noqa: TRY004 - decoders take this for a fault of the sample
        return cls(bytes(cast("bytes", value)))

    def in_base64(self) -> str:
        """Return all of it as it stands in JSON."""
        return base64.b64encode(self.read()).decode()

    # What pydantic asks of a type; a schema of its core is plain data, so nothing is imported.

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        reads = {"type": "no-info", "function": cls.read_from}
        writes = {"type": "function-plain", "function": cls.in_base64, "when_used": "json"}
        return {"type": "function-plain", "function": reads, "serialization": writes}

    @classmethod
    def __get_pydantic_json_schema__(cls, _schema: Any, _handler: Any) -> dict[str, Any]:
        return dict(SCHEMA)


SCHEMA: dict[str, str] = {"type": "string", "contentEncoding": "base64", "contentMediaType": "application/octet-stream"}
"""How a file stands in documents."""
