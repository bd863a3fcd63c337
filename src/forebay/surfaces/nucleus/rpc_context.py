# SPDX-License-Identifier: Apache-2.0
"""What a method of a gRPC handler is given as `context`: the servicer context of grpcio, as far as handlers use it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, Self

from forebay.workers.user_calls.cancel import is_cancelled

OK: Final = 0
CANCELLED: Final = 1
UNKNOWN: Final = 2
INTERNAL: Final = 13
UNAVAILABLE: Final = 14
_HIGHEST: Final = 16
_NAME: Final = re.compile(r"[0-9a-z_.-]+")

Pairs = list[tuple[str, Any]]


class Aborted(Exception):
    """The method has called `abort`; the context says with what."""


class RpcContext:
    """One call, as its method sees it."""

    def __init__(self, params: Mapping[str, Any], begin: Callable[[Pairs], None]) -> None:
        """Describe the call.

        Args:
            begin: Called with metadata that is to go before the first message.
        """
        self._params = params
        self._begin = begin
        self._code: int | None = None
        self._details = ""
        self._trailing: Pairs = []
        self._callbacks: list[Callable[[], object]] = []
        self._is_over = False

    # What the client says

    def invocation_metadata(self) -> tuple[Any, ...]:
        """Return what the client says beside its messages: pairs that have a `key` and a `value` as well."""
        return tuple(_Pair(*pair) for pair in self._params["metadata"])

    def peer(self) -> str:
        """Return who calls, such as `ipv4:127.0.0.1:50123`."""
        return self._params["peer"]

    def peer_identities(self) -> None:
        """Return None: clients do not prove who they are."""

    def peer_identity_key(self) -> None:
        """Return None, as above."""

    def auth_context(self) -> dict[str, Any]:
        """Return nothing, as above."""
        return {}

    def time_remaining(self) -> float | None:
        """Return how many seconds the client still waits; None if it waits for ever."""
        deadline = self._params["deadline"]
        return None if deadline is None else max(deadline - time.monotonic(), 0.0)

    def is_active(self) -> bool:
        """Tell whether the client still waits."""
        return not self._is_over and not is_cancelled()

    def add_callback(self, callback: Callable[[], object]) -> bool:
        """Have something called once the call is over; returns False if it is."""
        if not self._is_over:
            self._callbacks.append(callback)
        return not self._is_over

    # What the method says

    def send_initial_metadata(self, initial_metadata: Iterable[tuple[str, Any]]) -> None:
        """Send metadata before the first message."""
        self._begin(_checked(initial_metadata))

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, Any]]) -> None:
        """Send metadata with the status."""
        self._trailing = _checked(trailing_metadata)

    def trailing_metadata(self) -> Sequence[tuple[str, Any]]:
        """Return what was set."""
        return tuple(self._trailing)

    def set_code(self, code: Any) -> None:
        """End the call with this status; a `grpc.StatusCode` or its number."""
        self._code = _number(code)

    def code(self) -> int | None:
        """Return the number of the status that was set."""
        return self._code

    def set_details(self, details: Any) -> None:
        """End the call with this text."""
        self._details = _text(details)

    def details(self) -> str:
        """Return what was set."""
        return self._details

    def abort(self, code: Any, details: Any) -> NoReturn:
        """End the call at once with a status other than OK; always raises Aborted."""
        self._code, self._details = _number(code), _text(details)
        if self._code == OK:
            self._code = UNKNOWN  # as grpcio has it
        raise Aborted(self._details)

    def abort_with_status(self, status: Any) -> NoReturn:
        """End the call at once with a `grpc.Status`; always raises Aborted."""
        self._trailing = _checked(status.trailing_metadata or ())
        self.abort(status.code, status.details)

    def cancel(self) -> NoReturn:
        """End the call as one that was cancelled; always raises Aborted."""
        self.abort(CANCELLED, "the call was cancelled")

    def set_compression(self, compression: Any) -> None:
        """Do nothing: answers are not compressed."""

    def disable_next_message_compression(self) -> None:
        """Do nothing, as above."""

    # How it ends

    def fail(self, code: int, details: str) -> None:
        """End the call as one that failed."""
        self._code, self._details = code, details

    @property
    def is_plain(self) -> bool:
        """Whether nothing was said that a plain answer does not say."""
        return self._code is None and not self._details and not self._trailing

    def end(self, message: bytes | None, before: Sequence[Pairs]) -> list[Any]:
        """Return what ends the call; see `rpc_runner`."""
        begun = [pair for one in before for pair in one]
        return ["end", self._code or OK, self._details, self._trailing, message, begun]

    def finish(self) -> list[Callable[[], object]]:
        """End the call; returns what is to be called now."""
        self._is_over = True
        callbacks, self._callbacks = self._callbacks, []
        return callbacks


class _Pair(tuple[str, Any]):
    """A pair whose parts have names, as those of grpcio."""

    __slots__ = ()

    def __new__(cls, key: str, value: Any) -> Self:
        return super().__new__(cls, (key, value))

    @property
    def key(self) -> str:
        return self[0]

    @property
    def value(self) -> Any:
        return self[1]


def _number(code: Any) -> int:
    value = getattr(code, "value", code)
    number = value[0] if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownVariableType]
    if isinstance(number, bool) or not isinstance(number, int) or not OK <= number <= _HIGHEST:
        raise TypeError(f"expected a grpc.StatusCode, got {code!r}")
    return number


def _text(details: Any) -> str:
    return details.decode(errors="replace") if isinstance(details, bytes) else str(details)


def _checked(metadata: Iterable[tuple[str, Any]]) -> Pairs:
    """Return metadata as plain data; raises ValueError if a name or a value cannot be written."""
    found: Pairs = []
    for name, value in metadata:
        if not _NAME.fullmatch(name) or name.startswith("grpc-"):
            msg = f"metadata: expected a key of lower-case letters, digits, '_', '-' and '.', got {name!r}"
            raise ValueError(msg)
        if name.endswith("-bin"):
            found.append((name, value.encode() if isinstance(value, str) else bytes(value)))
            continue
        text = value.decode("ascii") if isinstance(value, bytes) else str(value)
        if not (text.isascii() and text.isprintable()):
            msg = f"the metadata {name!r} is {value!r}; call it '{name}-bin' to send anything but printable ASCII"
            raise ValueError(msg)
        found.append((name, text.strip()))
    return found
