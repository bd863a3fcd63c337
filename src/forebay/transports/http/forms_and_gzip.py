# SPDX-License-Identifier: Apache-2.0
"""Bodies that are read in steps beside the loop: packed ones, and forms whose long files go to disk as they come.

Theory of operation. Pieces of a body arrive on the loop; each is fed to a `Staged` in a thread. What it is made of:
`_Unpacker` (gzip, deflate) in front of a sink, which is `_Whole` (any other body) or `_Form`. Every limit counts what
was unpacked, while it is, so that a bomb is refused at the limit and not after it. What is unpacked, and what a form
keeps in memory and on disk, is counted for all requests together until the request is answered.
"""

from __future__ import annotations

import asyncio
import atexit
import gzip
import io
import logging
import os
import tempfile
import threading
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol

from forebay.errors import InvalidRequest, TooLarge, Unavailable
from forebay.protocols.native import UnsupportedMedia
from forebay.serving.models.named import named
from forebay.types.element_limits import too_long
from forebay.types.file import FormPart
from forebay.workers.processes.private_folder import PrivateFolder

if TYPE_CHECKING:
    from starlette.types import Receive

    from forebay.server.byte_budget import ByteBudget
    from forebay.server.config import HttpConfig
    from forebay.transports.http.head import Head

log = logging.getLogger("forebay")

PACKINGS: Final = frozenset({b"gzip", b"x-gzip", b"deflate"})
"""What bodies may be packed with."""
MAX_MEMBERS: Final = 10_000
"""Parts of a body that were packed each by itself, with gzip; one takes 20 bytes, may give none, and has its cost."""
_STEP_BYTES: Final = 64 * 1024
_MAX_HEADERS: Final = 8
_MAX_HEADER_BYTES: Final = 4096
_MAX_NAME_BYTES: Final = 256
_PLAIN_CODINGS: Final = frozenset({"", "7bit", "8bit", "binary"})


def packed(body: bytes, packing: bytes) -> bytes:
    """Pack an answer."""
    return gzip.compress(body, 1) if packing == b"gzip" else zlib.compress(body, 1)


class Staging:
    """How the bodies of a server are staged, and what all of them take."""

    def __init__(self, config: HttpConfig, byte_budget: ByteBudget) -> None:
        self.config = config
        self.memory = byte_budget
        limit = config.max_form_disk_bytes
        self.disk = _DiskBudget(limit, f"the files of forms that are answered have {limit} bytes together")
        self._is_told = False
        self._is_without_disk = False

    def open(self, head: Head, max_body_bytes: int) -> Staged:
        """Begin to read the body of a request; raises InvalidRequest if it is a form whose boundary is not said."""
        assert head.route is not None
        sink: _Sink
        if head.params["in"] == "form":
            sink = _Form(
                head.form,
                self,
                on_disk=head.route.contract.shares_disk and self._has_disk(),
                max_body_bytes=max_body_bytes,
            )
        else:
            sink = _Whole(max_body_bytes, self)
        return Staged(self, _Unpacker(head.packing, sink) if head.packing else sink, sink)

    def kept(self) -> None:
        """Note that a file of a form was written."""
        self._is_told = False

    def _has_disk(self) -> bool:
        """Tell whether there is a folder for temporary files; a container with a read-only root may have none."""
        try:
            tempfile.gettempdir()
        except FileNotFoundError:
            if not self._is_without_disk:
                log.warning(
                    "no folder for temporary files: keeping forms in memory, with at most %d bytes (--max-body-bytes); "
                    "mount one at /tmp, or name one in TMPDIR",
                    self.config.max_body_bytes,
                )
            self._is_without_disk = True
            return False
        return True

    def not_kept(self, error: OSError) -> Unavailable:
        """Log that a file of a form could not be written; returns what its client is told."""
        refusal = Unavailable(f"the files of a form cannot be kept: {error.strerror}")
        if not self._is_told:  # once, until they can be kept again
            self._is_told = True
            log.warning("%s (in %s); long forms get 503", refusal.message, tempfile.gettempdir())
        return refusal


class Staged:
    """One body; `close` it once the request is answered."""

    def __init__(self, staging: Staging, entry: _Entry, sink: _Sink) -> None:
        self.max_bytes = sink.max_bytes
        self._staging = staging
        self._entry = entry
        self._sink = sink
        self._lock = threading.Lock()
        self._is_closed = False

    async def read(self, receive: Receive) -> bytes | None:
        """Read all of it, and return what the worker reads; None if the client goes away before its end.

        Raises:
            ForebayError: If it is refused.
        """
        received = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece: bytes = message.get("body", b"")
            received += len(piece)
            if received > self.max_bytes:
                raise too_long("body", self.max_bytes)
            if piece:
                await asyncio.to_thread(self._do, self._entry.feed, piece)
            if not message.get("more_body", False):
                return await asyncio.to_thread(self._do, self._finish)

    def close(self) -> None:
        """Remove what is left of it."""
        with self._lock:
            self._is_closed = True
            self._sink.close()

    def _finish(self) -> bytes:
        self._entry.end()
        return self._sink.body()

    def _do(self, step: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            if self._is_closed:
                return None
            try:
                return step(*arguments)
            except OSError as error:
                raise self._staging.not_kept(error) from error


class _DiskBudget:
    """Bytes on disk of all requests together; used by threads."""

    def __init__(self, limit: int, why: str) -> None:
        self._left = limit
        self._why = why
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        with self._lock:
            if size > self._left:
                raise Unavailable(f"{self._why}; try again later")
            self._left -= size

    def give(self, size: int) -> None:
        with self._lock:
            self._left += size


class _Entry(Protocol):
    def feed(self, data: bytes) -> None: ...

    def end(self) -> None: ...


class _Sink(_Entry, Protocol):
    max_bytes: int

    def body(self) -> bytes: ...

    def close(self) -> None: ...


class _Unpacker:
    """Unpacks what it is fed, a step at a time."""

    def __init__(self, packing: bytes, sink: _Sink) -> None:
        self._sink = sink
        self._is_gzip = packing != b"deflate"
        self._packing = packing.decode()
        self._unpack: Any = zlib.decompressobj(zlib.MAX_WBITS | 16) if self._is_gzip else None
        self._begin = b""
        self._members = 1

    def feed(self, data: bytes) -> None:
        if self._unpack is None:
            data = self._begin = self._begin + data
            if len(data) < len("xx"):
                return
            # Some send what the name says, without the two bytes that RFC 9110 asks for.
            is_wrapped = data[0] & 15 == zlib.DEFLATED and int.from_bytes(data[:2], "big") % 31 == 0
            self._unpack = zlib.decompressobj(zlib.MAX_WBITS if is_wrapped else -zlib.MAX_WBITS)
        try:
            for at in range(0, len(data), _STEP_BYTES):  # what is left of a piece is copied with each step
                self._feed(data[at : at + _STEP_BYTES])
        except zlib.error as error:
            raise InvalidRequest(f"the body is not packed with {self._packing}: {error}") from None

    def _feed(self, data: bytes) -> None:
        while data:
            if self._unpack.eof:
                if not self._is_gzip:
                    raise InvalidRequest(f"the body continues after its {self._packing} data")
                if self._members == MAX_MEMBERS:
                    msg = f"the body has more than {MAX_MEMBERS} parts that were packed each by itself; pack it as one"
                    raise TooLarge(msg)
                self._members += 1
                self._unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
            self._sink.feed(self._unpack.decompress(data, _STEP_BYTES))
            data = self._unpack.unconsumed_tail or self._unpack.unused_data

    def end(self) -> None:
        if self._unpack is not None:
            self._sink.feed(self._unpack.flush())
        if self._unpack is None or not self._unpack.eof:
            raise InvalidRequest(f"the body breaks off before the end of what was packed with {self._packing}")
        self._sink.end()


class _Whole:
    """A body that is kept in memory."""

    def __init__(self, max_bytes: int, staging: Staging) -> None:
        self.max_bytes = max_bytes
        self._budget = staging.memory
        self._joined = io.BytesIO()
        self._size = 0

    def feed(self, data: bytes) -> None:
        if self._size + len(data) > self.max_bytes:
            raise TooLarge(f"the body is longer than {self.max_bytes} bytes once it is unpacked")
        self._budget.take(len(data))
        self._size += len(data)
        self._joined.write(data)

    def end(self) -> None:
        pass

    def body(self) -> bytes:
        return self._joined.getvalue()

    def close(self) -> None:
        self._joined.close()
        self._budget.give(self._size)
        self._size = 0


class _Form:
    """The parts of a form: fields in memory, files in memory or on disk."""

    def __init__(self, content_type: bytes, staging: Staging, *, on_disk: bool, max_body_bytes: int) -> None:
        from python_multipart.multipart import MultipartParser, parse_options_header

        config = staging.config
        # Where workers do not see the disk, a form is a body like any other.
        self.max_bytes = config.max_form_bytes if on_disk else max_body_bytes
        self._max_memory_bytes = config.form_memory_bytes if on_disk else max_body_bytes
        self._max_parts = config.max_form_parts
        self._on_disk = on_disk
        self._staging = staging
        self._options = parse_options_header
        boundary = self._options(content_type)[1].get(b"boundary", b"")
        if not boundary:
            raise InvalidRequest("the Content-Type multipart/form-data names no boundary")
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._on_header_name,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_head,
                    "on_part_data": self._on_data,
                    "on_part_end": self._end_part,
                    "on_end": self._on_end,
                },
                max_header_count=_MAX_HEADERS,
                max_header_size=_MAX_HEADER_BYTES,
            )
        except ValueError as error:
            raise InvalidRequest(f"the boundary of the form cannot be used: {error}") from None
        self._parser.logger.disabled = True  # it warns of what clients are told
        self._parts: list[FormPart] = []
        self._paths: list[Path] = []
        self._size = self._in_fields = self._in_files = self._memory = self._disk = 0
        self._is_whole = False
        self._header = [b"", b""]
        self._headers: dict[bytes, bytes] = {}
        self._name, self._filename, self._type = "", None, ""
        self._content = bytearray()
        self._file: BinaryIO | None = None

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self.max_bytes:
            raise TooLarge(f"the form is longer than {self.max_bytes} bytes")
        try:
            self._parser.write(data)
        except ValueError as error:  # python-multipart's own are
            raise InvalidRequest(f"the form cannot be read: {error}") from None

    def end(self) -> None:
        if not self._is_whole:
            raise InvalidRequest("the form breaks off before its last boundary")

    def body(self) -> bytes:
        return named(self._parts)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._staging.memory.give(self._memory)
        self._staging.disk.give(self._disk)
        self._parts, self._paths = [], []
        self._memory = self._disk = 0
        self._parser.callbacks = {}  # they refer to the form: without them it is freed at once

    # What the parser finds

    def _begin(self) -> None:
        if len(self._parts) >= self._max_parts:
            raise TooLarge(f"the form has more than {self._max_parts} fields and files (--max-form-parts)")
        self._headers = {}
        self._header = [b"", b""]
        self._content = bytearray()

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def _on_header_end(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value.strip()
        self._header = [b"", b""]

    def _on_head(self) -> None:
        kind, options = self._options(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name")
        if kind != b"form-data" or name is None:
            raise InvalidRequest("a part of the form has no name; write Content-Disposition: form-data; name=...")
        coding = _text(self._headers.get(b"content-transfer-encoding", b"")).lower()
        if coding not in _PLAIN_CODINGS:
            msg = "Content-Transfer-Encoding of a part of the form: expected none, 7bit, 8bit or binary, "
            msg += f"got {coding[:40]!r}"
            raise UnsupportedMedia(msg)
        self._name = _text(name)
        if len(self._name) > _MAX_NAME_BYTES:
            raise TooLarge(f"the name of a field is longer than {_MAX_NAME_BYTES} characters")
        filename = options.get(b"filename")
        self._filename = None if filename is None else _text(filename)
        self._type = _text(self._options(self._headers.get(b"content-type", b""))[0])

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        size = end - start
        is_field = self._filename is None
        if is_field:
            self._in_fields += size
            if self._in_fields > self._max_memory_bytes:
                raise TooLarge(f"the fields of the form are longer than {self._max_memory_bytes} bytes")
        elif self._file is None and self._on_disk and self._in_files + size > self._max_memory_bytes:
            self._move_to_disk()
        if self._file is not None:
            self._write(data[start:end])
            return
        self._staging.memory.take(size)
        self._memory += size
        self._in_files += 0 if is_field else size
        self._content += data[start:end]

    def _move_to_disk(self) -> None:
        handle, path = _new_file()
        self._paths.append(Path(path))
        self._file = os.fdopen(handle, "wb")
        self._write(bytes(self._content))
        size = len(self._content)
        self._staging.memory.give(size)
        self._memory -= size
        self._in_files -= size

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._staging.disk.take(len(data))
        self._disk += len(data)
        self._file.write(data)

    def _end_part(self) -> None:
        content, size = bytes(self._content), -1
        if self._file is not None:
            size = self._file.tell()
            self._file.close()
            self._file = None
            self._staging.kept()
            content = str(self._paths[-1]).encode()
        self._parts.append(FormPart(self._name, content, self._filename, self._type, size))

    def _on_end(self) -> None:
        self._is_whole = True


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"a name in the form: expected UTF-8, got {value[:40]!r}") from None


_opening: Final = threading.Lock()


def _new_file() -> tuple[int, str]:
    with _opening:
        if not _folder().path.exists():  # somebody sweeps the temporary folder of what looks old
            _folder().remove()
            _folder.cache_clear()
        return tempfile.mkstemp(dir=_folder().path)


@cache
def _folder() -> PrivateFolder:
    """Return where files of forms lie; it is gone when the server is, however it ends."""
    folder = PrivateFolder(Path(tempfile.gettempdir()))
    folder.guard()
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # and not a fork of it
            folder.remove()

    atexit.register(remove)
    return folder
