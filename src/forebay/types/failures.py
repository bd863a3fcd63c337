# SPDX-License-Identifier: Apache-2.0
"""Whatever was raised, as a `Failure` whose texts and detail every protocol can write.

User code raises exceptions that cannot be printed (a `__str__` that raises, a surrogate from a file name) or sent (a
detail that is a cycle). What can be told of them is made here; nothing here raises.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import Any, Final, TypeVar, cast

import msgspec

from forebay.errors import BadOutcome, Code, ForebayError, RunnerFailed, UserCodeError, known_kind, revive
from forebay.types.call import Failure

Raised = TypeVar("Raised", bound=BaseException)

MAX_MESSAGE: Final = 8 * 1024
"""Characters of a message that are kept; of a trace, which only the log sees, eight times as many."""
MAX_DETAIL_BYTES: Final = 64 * 1024
"""What the detail of an error may take as JSON; a longer one is replaced by its beginning."""


def failure_of(error: BaseException) -> Failure:
    """Wrap what user code raised: forebay's own errors keep their kind, all others become `RunnerFailed`.

    What could not be printed or sent is made so; this never raises.
    """
    failure = Failure(_named(error))
    with contextlib.suppress(BaseException):  # a class of the user's may do anything
        without_frames(error)  # they hold the batch, whose requests the garbage collector does not look at
    return failure


def _named(error: BaseException) -> ForebayError:
    if not isinstance(error, ForebayError):
        return RunnerFailed(text_of(error), trace=trace_of(error))
    with contextlib.suppress(BaseException):
        if isinstance(error, UserCodeError) and not error.trace:
            error.trace = trace_of(error)
        if _can_be_told(error):
            return error
    return _told(error)


def without_frames(error: Raised) -> Raised:
    """Take the frames away from an error and from what it came of: they hold all that the call held, and hold it."""
    rest: list[BaseException | None] = [error]
    seen: set[int] = set()
    while rest:
        one = rest.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        BaseException.with_traceback(one, None)
        rest += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            rest += cast("BaseExceptionGroup[BaseException]", one).exceptions
    return error


def failure_in(outcome: Failure) -> Failure:
    """Return a `Failure` that user code made, which may hold anything."""
    error = cast("Any", outcome.error)
    if isinstance(error, ForebayError):
        found = failure_of(error)
        return outcome if found.error is error else found
    if isinstance(error, BaseException):
        return failure_of(error)
    return Failure(
        BadOutcome(f"a Failure holds {_printed(error)}; it takes an exception, such as forebay.RequestError")
    )


def text_of(error: BaseException) -> str:
    """Return the kind and the text of an exception, whatever its own methods do."""
    return f"{type(error).__name__}: {words_of(error)}"


def words_of(found: object) -> str:
    """Return the text of an exception alone, or of anything else that user code gave to be told."""
    return clean(_printed(found))


def trace_of(error: BaseException, *, skip: int = 0) -> str:
    """Return the traceback of an exception, whatever its own methods do; without its first `skip` frames."""
    try:
        frames = error.__traceback__
        for _ in range(skip):
            frames = frames and frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
    except BaseException:  # noqa: BLE001 - a `__str__`, `__cause__` or `__notes__` of the user's
        text = f"{_frames_of(error)}{text_of(error)}\n"
    return clean(text, 8 * MAX_MESSAGE)


def _frames_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_tb(error.__traceback__))
    except BaseException:  # noqa: BLE001 - a `__traceback__` of the user's, or no room left on the stack
        return ""


def _can_be_told(error: ForebayError) -> bool:
    """Tell whether an error is what its class promises: only user code makes others."""
    message = error.message
    if type(message) is not str or clean(message) is not message or type(error.code) is not Code:
        return False
    if isinstance(error, UserCodeError):
        error.is_logged = bool(error.is_logged)
        if type(error.trace) is not str or clean(error.trace, 8 * MAX_MESSAGE) is not error.trace:
            return False
    return error.detail is None or _is_plain(error.detail)


def _told(error: ForebayError) -> ForebayError:
    """Return what can be told of an error of the user's: the class of ours nearest to it, with texts in order."""
    message = _attribute(error, "message")
    detail = _attribute(error, "detail")
    trace = _attribute(error, "trace")
    return revive(
        known_kind(error),
        clean(message) if isinstance(message, str) else text_of(error),
        None if detail is None else _plain(detail),
        clean(trace, 8 * MAX_MESSAGE) if isinstance(trace, str) and trace else trace_of(error),
    )


def _attribute(error: ForebayError, name: str) -> Any:
    try:
        return getattr(error, name, None)
    except BaseException:  # noqa: BLE001 - a property of the user's
        return None


def clean(text: str, most: int = MAX_MESSAGE) -> str:
    """Return the text itself if every protocol can write it, else as much of it as can be written."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"
    if type(text) is str and text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:  # surrogates, as file names that are not UTF-8 hold them
        return text.encode("utf-8", "backslashreplace").decode()
    return text if type(text) is str else str.__str__(text)


def _printed(value: Any) -> str:
    try:
        return str(value)
    except BaseException as second:  # noqa: BLE001 - the user's own __str__
        return f"(a {type(value).__name__} whose text cannot be made: {type(second).__name__})"


def _is_plain(detail: Any) -> bool:
    """Tell whether a detail can be written in JSON and in msgpack, and is not too long."""
    try:
        msgspec.msgpack.encode(detail)
        return len(msgspec.json.encode(detail)) <= MAX_DETAIL_BYTES
    except Exception:  # noqa: BLE001 - a cycle, a surrogate, an object: msgspec calls nothing of the user's here
        return False


def _plain(detail: Any) -> Any:
    """Return a detail, or what can be told of it."""
    if _is_plain(detail):
        return detail
    try:
        plain = msgspec.json.decode(msgspec.json.encode(detail, enc_hook=_printed))
        if _is_plain(plain):
            return plain
    except BaseException:  # noqa: BLE001, S110 - it is told in words then
        pass
    try:
        text = repr(detail)
    except BaseException:  # noqa: BLE001 - the user's own __repr__
        text = f"a {type(detail).__name__}"
    return clean(text)
