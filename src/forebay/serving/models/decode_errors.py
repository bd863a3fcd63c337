# SPDX-License-Identifier: Apache-2.0
"""What decoders raise, in words for the sender of the body."""

from __future__ import annotations

import codecs
import json
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast

import msgspec

from forebay.serving.models.schema_places import fields_at, values_at
from forebay.types.did_you_mean import nearest
from forebay.types.file import NO_BASE64
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.serving.models.schema import Buffer, Decode, WireType

Kind: TypeAlias = Literal["malformed", "invalid", "internal"]

MAX_PROBLEMS: Final = 10
"""Problems named in one message; a body of a million bad rows must not make an answer of a million lines."""

_BYTE: Final = re.compile(r"\(byte (\d+)\)$")
# The path is always last. A field name of the client's that looks like one fools only its sender.
_AT: Final = re.compile(r" - at (?:`key` in )?`(\$[^`]*)`$")
_LINE: Final = re.compile(r" at line (\d+) column (\d+)$")
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `([^`]{1,100})`")
_ENUM: Final = re.compile(r"Invalid enum value ")
_STEPS: Final = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
# Half of a pair of surrogates that is followed by something else than what may begin its other half.
_HALF: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!(?:\\(?:u[0-9a-fA-F]{0,4})?)?\Z)")
_TAIL_BYTES: Final = 64
_NO_NUMBER: Final = re.compile(rb"-?(?:NaN|Infinity)")
_BASE64: Final = "; use the alphabet with + and /, with padding, without line ends and without `data:` before it"
_MAX_SEARCHED_BYTES: Final = 64 * 1024
_MAX_SEARCHED_FIELDS: Final = 64
_MAX_NAMED: Final = 32
"""Values or fields that are named to who sent another one."""


class Explanation(NamedTuple):
    """What was wrong with a body, in words for its sender."""

    kind: Kind
    message: str
    path: str | None
    position: int | None
    problems: Sequence[Mapping[str, str]] = ()
    """The path and the message of each, if there are several."""


_EMPTY: Final = Explanation("malformed", "The body is empty; a sample is the body, and not the query", None, 0)


def explain(error: BaseException, body: Buffer | None = None, given: WireType | None = None) -> Explanation:
    """Turn what a decoder raised into words.

    `malformed`: not JSON or msgpack at all, or nested too deeply. `invalid`: readable, of the wrong type. `internal`:
    no decoder raises this; it came from code of the user's that ran while decoding, and the client is not told more.
    The first fault wins: msgspec stops at a wrong type and does not look whether the rest is well-formed.

    Args:
        body: What it was given; only with it can the position of a truncated body or of a bad character be told.
        given: What was to be read; only with it and the body can a misspelt field be told.
    """
    found = _explain(error, body, given)
    hint = "" if body is None or not found.message.startswith("JSON is malformed") else _hint(body, found.position or 0)
    return found._replace(message=f"{found.message}; {hint}") if hint else found


def _hint(body: Buffer, position: int) -> str:
    """Return what JSON has not and others write, as the end of a sentence; empty if it is something else."""
    if bytes(body[:3]) == codecs.BOM_UTF8:
        return "it begins with a byte order mark, send UTF-8 without one"
    if bytes(body[:2]) in {codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE}:
        return "it is in UTF-16, send UTF-8"
    found = _NO_NUMBER.search(bytes(body[max(position - 2, 0) : position + len("-Infinity")]))
    return f"JSON has no {found[0].decode()}, send null, or msgpack" if found else ""


def _explain(error: BaseException, body: Buffer | None, given: WireType | None) -> Explanation:
    known = frozenset[str]() if given is None else given.field_names
    if isinstance(error, msgspec.ValidationError):
        return _explain_msgspec(str(error), body, known, given)
    if isinstance(error, msgspec.DecodeError):
        if body is not None and not memoryview(body).nbytes:
            return _EMPTY
        message = str(error)
        if found := _BYTE.search(message):
            return Explanation("malformed", message, None, int(found[1]))
        if message == "Input data was truncated":
            if body is not None and (end := _end_of_half(body)):
                return _malformed("JSON is malformed: unexpected end of escaped utf-16 surrogate pair", end)
            message = "The body ends in the middle of a value"
        return _malformed(message, None if body is None else memoryview(body).nbytes)
    if isinstance(error, UnicodeDecodeError):  # msgspec lets it through
        return _malformed(f"A string is not UTF-8: {error.reason}", _find_bad_character(error, body))
    if isinstance(error, RecursionError):
        return Explanation("malformed", "The body is nested too deeply", None, None)
    pydantic_core: Any = sys.modules.get("pydantic_core")  # who never loaded it has none of its errors
    if pydantic_core is not None and isinstance(error, pydantic_core.ValidationError):
        return _explain_pydantic(cast("Any", error), known)
    return Explanation("internal", f"{type(error).__name__} while the body was decoded", None, None)


def _malformed(message: str, position: int | None) -> Explanation:
    if position is not None:
        message = f"{message} (byte {position})"
    return Explanation("malformed", message, None, position)


def _explain_msgspec(message: str, body: Buffer | None, known: frozenset[str], given: WireType | None) -> Explanation:
    found = _AT.search(message)
    path = found[1] if found else "$"  # without a path it is the whole body
    if missing := _MISSING.match(message):
        if known and body is not None and memoryview(body).nbytes <= _MAX_SEARCHED_BYTES:
            message += _misspelt(missing[1], _fields_at(path, bytes(body)), known)
        path += _step(missing[1])
    elif unknown := _UNKNOWN.match(message):
        here = () if given is None else fields_at(path, *given.places)
        meant = nearest(unknown[1], here or known)
        message += f"; did you mean `{meant}`?" if meant else _possible(path, given, fields_at)
    elif message.startswith(NO_BASE64):
        message += _BASE64
    elif _ENUM.match(message):
        message += _possible(path, given, values_at)
    return Explanation("invalid", message, path, None)


def _possible(path: str, given: WireType | None, look: Callable[..., Sequence[Any]]) -> str:
    """Return what may stand at a place, as the end of a sentence; empty if that is not known, or is too much."""
    found = () if given is None else look(path, *given.places)
    if not 0 < len(found) <= _MAX_NAMED:
        return ""
    return f"; {', '.join(f'`{one}`' for one in found)} {'are' if len(found) > 1 else 'is'} allowed"


def _fields_at(path: str, body: bytes) -> Any:
    """Return the object at a path of a body that could be read, or something else if it is not found."""
    decode: Decode = (msgspec.msgpack if body[:1] >= b"\x80" else msgspec.json).decode
    found, error = caught(decode, body)
    for name, place in _STEPS.findall(path):
        if error is None:
            found, error = caught(operator.getitem, found, name or int(place))
    is_found, error = error is None, None  # its frames hold this one, and with it the body: a circle
    return found if is_found else None


def _misspelt(missing: str, sent: Any, known: frozenset[str]) -> str:
    """Return where a missing field probably is, misspelt or a level deeper, as the end of a sentence; else nothing."""
    if not isinstance(sent, dict) or len(cast("dict[Any, Any]", sent)) > _MAX_SEARCHED_FIELDS:
        return ""
    for name, value in cast("dict[Any, Any]", sent).items():
        if isinstance(name, str) and name not in known and isinstance(value, dict) and missing in value:
            return f"; it stands in `{name[:40]}`, leave that level out"
    others = [name for name in cast("dict[Any, Any]", sent) if isinstance(name, str) and name not in known]
    meant = nearest(missing, [name for name in others if len(name) <= 2 * len(missing)])
    return f"; `{meant}` is there, did you mean `{missing}`?" if meant else ""


def _end_of_half(body: Buffer) -> int:
    """Return where half of a pair of surrogates ends right before the end of a body of JSON; 0 if there is none.

    msgspec takes such a body for one that was cut there: for the other half it asks for six bytes more.
    """
    size = memoryview(body).nbytes
    found = None if bytes(body[:1]) >= b"\x80" else _HALF.search(body, max(0, size - _TAIL_BYTES))
    return 0 if found is None else found.end()


def _find_bad_character(error: UnicodeDecodeError, body: Buffer | None) -> int | None:
    """Find the string in the body that is not UTF-8; the error only knows the place within that string."""
    if body is None:
        return None
    whole = bytes(body)
    start = whole.find(error.object)
    if start >= 0:
        return start + error.start
    # A string with escapes was copied by the decoder, so it is not in the body as it stands.
    try:
        whole.decode()
    except UnicodeDecodeError as again:
        return again.start
    return None


def _explain_pydantic(error: Any, known: frozenset[str]) -> Explanation:
    problems: list[dict[str, Any]] = error.errors(include_url=False, include_context=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        return _explain_pydantic_json(str(first["msg"]), first["input"])
    if any(problem["type"] in ("recursion_loop", "recursion_depth_exceeded") for problem in problems):
        return Explanation("malformed", "The body is nested too deeply", None, None)
    told: list[dict[str, str]] = []
    for problem in problems[:MAX_PROBLEMS]:
        if problem["type"] == "missing":
            message = problem["msg"] + _misspelt(str(problem["loc"][-1]), problem["input"], known)
        elif problem["type"].endswith("_type"):
            message = f"{problem['msg']}, got `{type(problem['input']).__name__}`"
        else:  # it is of the right type: to name that as what is wrong would lead astray
            message = problem["msg"] + (_BASE64 if NO_BASE64 in problem["msg"] else "")
        told.append({"path": _path(problem["loc"]), "message": message})
    lines = [f"{one['message']} - at `{one['path']}`" for one in told]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return Explanation("invalid", "; ".join(lines), told[0]["path"], None, told if len(told) > 1 else ())


def _explain_pydantic_json(message: str, body: Any) -> Explanation:
    if body == b"":
        return _EMPTY
    message = message.replace("Invalid JSON: ", "JSON is malformed: ", 1)
    found = _LINE.search(message)
    if found is None or not isinstance(body, bytes | bytearray):
        return Explanation("malformed", message, None, None)
    message = message[: found.start()]
    if "EOF" in message:
        return _malformed(message, len(body))
    line, column = int(found[1]), int(found[2])
    start = 0
    for _ in range(line - 1):
        start = body.find(b"\n", start) + 1
    return _malformed(message, start + max(column - 1, 0))


def _path(loc: tuple[int | str, ...]) -> str:
    return "$" + "".join(_step(step) for step in loc)


def _step(step: int | str) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if step.isidentifier() else f"[{json.dumps(step)}]"
