# SPDX-License-Identifier: Apache-2.0
"""The body of a request, as people write it for the commands that ask a server: JSON, a file, a form."""

from __future__ import annotations

import contextlib
import json
import mimetypes
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from forebay.errors import ConfigError

HELP: Final = """\
  '{"x": [1, 2]}'    JSON, sent as it is
  @FILE              a file: .json as JSON, .msgpack as msgpack, anything else as bytes
  -                  what comes from standard input: JSON if it is, else bytes
  NAME=VALUE ...     a form with these fields; NAME=@FILE sends a file
"""
_TYPES: Final = {".json": "application/json", ".msgpack": "application/msgpack"}
_BYTES: Final = "application/octet-stream"
_FIELD: Final = re.compile(r"([\w.\[\]-]+)=(.*)", re.DOTALL)
_LONGEST_PATH: Final = 1024


def body_of(data: Sequence[str]) -> tuple[bytes | None, str | None]:
    """Return what DATA says to send, and the media type it probably has; nothing without DATA.

    Raises:
        ConfigError: If it is neither JSON nor a form, or a file that cannot be read.
    """
    if not data:
        return None, None
    fields = [_FIELD.fullmatch(one) for one in data]
    if any(fields):
        return _form([(found[1], found[2]) for found in fields if found], data)
    if len(data) > 1:
        raise ConfigError(f"DATA is one text; {data[1]!r} is a second one. Quote it, or write a form: NAME=VALUE")
    return _one(data[0])


def _one(data: str) -> tuple[bytes, str]:
    if data == "-":
        body = sys.stdin.buffer.read()
        return body, _TYPES[".json"] if _is_json(body) else _BYTES
    if data.startswith("@"):
        path = Path(data[1:])
        return _content(path), _TYPES.get(path.suffix, _BYTES)
    try:
        body = data.encode()
        with contextlib.suppress(RecursionError):  # the server says what it makes of that
            json.loads(data)
    except ValueError as failure:
        is_file = len(data) < _LONGEST_PATH and Path(data).is_file()
        hint = f"did you mean @{data}?" if is_file else "to send a file write @FILE, for a form NAME=VALUE"
        if re.fullmatch(r"[\w ,.!?-]+", data):
            hint = f"a text in JSON has quotes: '{json.dumps(data, ensure_ascii=False)}'; {hint}"
        raise ConfigError(f"the data is not JSON: {failure}; {hint}") from failure
    return body, _TYPES[".json"]


def _form(fields: Sequence[tuple[str, str]], data: Sequence[str]) -> tuple[bytes, str]:
    """Return a form, as RFC 7578 has it."""
    if len(fields) < len(data):
        other = next(one for one in data if _FIELD.fullmatch(one) is None)
        raise ConfigError(f"{other!r} is not a form field; write NAME=VALUE or NAME=@FILE")
    boundary = secrets.token_hex(16)
    parts: list[bytes] = []
    for name, value in fields:
        head, body = f'name="{name}"', value.encode()
        if value.startswith("@"):
            path = Path(value[1:])
            body = _content(path)
            file = re.sub(r'["\r\n]', lambda found: f"%{ord(found[0]):02X}", path.name)
            head += f'; filename="{file}"\r\nContent-Type: {mimetypes.guess_type(path.name)[0] or _BYTES}'
        parts += [f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode(), body, b"\r\n"]
    return b"".join([*parts, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as failure:
        raise ConfigError(f"{path} cannot be read: {failure.strerror}") from failure


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body.decode())
    except (ValueError, RecursionError):
        return False
    return True
