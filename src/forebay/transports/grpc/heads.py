# SPDX-License-Identifier: Apache-2.0
"""What the header block of a call means; it is read once for each distinct block."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from forebay.errors import InvalidRequest
from forebay.transports.api_keys import KeyHolders, lets_in, no_key
from forebay.transports.grpc.messages import ENCODINGS
from forebay.transports.grpc.statuses import ACCEPTED_ENCODINGS, HEADERS, Status, http_refusal, trailers
from forebay.types.call import nothing
from forebay.types.did_you_mean import meant

if TYPE_CHECKING:
    from forebay.transports.grpc.hpack import Field
    from forebay.transports.grpc.messages import PlacesOf
    from forebay.types.tenant import Tenant

Metadata = tuple[tuple[str, str | bytes], ...]

MAX_GUESSES: Final = 10
"""Paths of no method for which it is told between two sweeps what there is instead: with many methods that takes
milliseconds."""

_TIMEOUT: Final = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_OF_HTTP_1: Final = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_BAD_VALUE: Final = re.compile(rb"[\0\r\n]")
_OWN: Final = frozenset({b"te", b"content-type", b"content-length"})


class Malformed(Exception):
    """Fields that no HTTP/2 request may have."""


class Method:
    """A method of a service.

    Attributes:
        begin: Called with the call and its only message; for a stream with the call alone, as soon as it begins.
        lands: Says from its beginning where a long message lands, of which the method takes a view; None if it takes
            bytes.
    """

    __slots__ = ("begin", "is_public", "is_stream", "lands")

    def __init__(self, begin: Callable[..., None], *, is_stream: bool = False, is_public: bool = False) -> None:
        self.begin = begin
        self.is_stream = is_stream
        self.is_public = is_public
        self.lands: PlacesOf | None = None


class CallHead:
    """What is known of a call before its messages.

    Attributes:
        begin: What begins its method.
        is_stream: Whether the method takes any number of messages.
        timeout_s: Time the client gives it, None if it has any.
        encoding: How its messages may be compressed.
        length: Bytes that will come, -1 if that was not said.
        is_public: Whether the method needs no API key.
        lands: Says from its beginning where a long message lands, of which the method takes a view; None if it takes
            bytes.
        metadata: What the client says beside its messages.
        path: Service and method.
        refusal: The header block of its answer if nothing of it is wanted.
        reason: Why not, for the log.
        status: Its status then.
        tenant: Whose key it shows, where keys have names.
    """

    __slots__ = (
        "begin",
        "encoding",
        "is_public",
        "is_stream",
        "lands",
        "length",
        "metadata",
        "path",
        "reason",
        "refusal",
        "status",
        "tenant",
        "timeout_s",
    )

    def __init__(self) -> None:
        self.begin: Callable[..., None] = nothing
        self.is_stream = False
        self.is_public = False
        self.lands: PlacesOf | None = None
        self.timeout_s: float | None = None
        self.encoding = b"identity"
        self.length = -1
        self.metadata: Metadata = ()
        self.path = b""
        self.status = Status.UNIMPLEMENTED
        self.refusal: bytes | None = None
        self.reason = ""
        self.tenant: Tenant | None = None

    def refuse(self, status: Status, text: str) -> None:
        """Want nothing of it."""
        self.status = status
        self.refusal, self.reason = HEADERS + trailers(status, text), text


class HeadReader:
    """Reads heads for one port.

    Attributes:
        guesses: How often it may still tell what there is instead; each sweep of the port allows for some more.
    """

    def __init__(
        self, methods: Mapping[bytes, Method], api_keys: Sequence[str], max_bytes: int, max_fields: int = 128
    ) -> None:
        """Describe the port.

        Args:
            methods: What is served, by path.
            api_keys: If any, what is not public needs one of them.
            max_bytes: Longest list of fields.
            max_fields: Most fields in it; each binary value of a field that has several counts as one.
        """
        self._max_fields = max_fields
        self._methods = methods
        self._names: dict[str, list[str]] = {}
        """What the methods of each service are called."""
        for path in methods:
            service, _, name = path.decode().removeprefix("/").partition("/")
            self._names.setdefault(service, []).append(name)
        self._keys = [key.encode() for key in api_keys]
        self._holders = KeyHolders(api_keys)
        self._max_bytes = max_bytes
        self.guesses = MAX_GUESSES

    def read(self, fields: Sequence[Field], size: int) -> CallHead:
        """Return what a list of fields means.

        Args:
            size: How long the list is; if that is too long, `fields` is not complete.

        Raises:
            Malformed: If it is not a request at all.
        """
        head = CallHead()
        if size > self._max_bytes:
            msg = f"metadata: expected at most {self._max_bytes} bytes, got {size}"
            head.refuse(Status.RESOURCE_EXHAUSTED, msg)
            return head
        count = len(fields) + sum(value.count(b",") for name, value in fields if name.endswith(b"-bin"))
        if count > self._max_fields:
            head.refuse(Status.RESOURCE_EXHAUSTED, f"metadata: expected at most {self._max_fields} fields, got {count}")
            return head
        # HTTP/2 calls spaces around a value malformed; gRPC has them stripped, and grpcio sends them.
        fields = [(name, value if name[:1] == b":" else value.strip(b" \t")) for name, value in fields]
        asked = _sorted(fields)
        head.path = asked[b":path"]
        if asked.get(b":method") != b"POST":
            head.refusal, head.reason = http_refusal(405, (b"allow", b"POST")), "expected the method POST"
        elif not _is_grpc(asked.get(b"content-type", b"")):
            head.refusal, head.reason = (
                http_refusal(415, (b"accept", b"application/grpc")),
                "expected content-type application/grpc",
            )
        else:
            self._read_call(head, asked, fields)
        return head

    def _read_call(self, head: CallHead, asked: Mapping[bytes, bytes], fields: Sequence[Field]) -> None:
        method = self._methods.get(asked[b":path"])
        if not (method is not None and method.is_public) and not lets_in(self._keys, fields):
            head.refuse(Status.UNAUTHENTICATED, no_key(fields))
            return
        if method is None:
            head.refuse(Status.UNIMPLEMENTED, self._not_found(head.path))
            return
        try:
            head.tenant = self._holders.in_headers(fields)
        except InvalidRequest as error:
            head.refuse(Status.INVALID_ARGUMENT, error.message)
            return
        if _is_json(asked[b"content-type"]):
            head.refuse(
                Status.UNIMPLEMENTED, "messages of JSON cannot be read here, those of protobuf can: application/grpc"
            )
            return
        head.begin, head.is_stream, head.is_public = method.begin, method.is_stream, method.is_public
        head.lands = method.lands
        encoding = asked.get(b"grpc-encoding", b"identity")
        if encoding != b"identity" and encoding not in ENCODINGS:
            text = f"messages cannot be unpacked with {encoding.decode(errors='replace')[:100]!r}"
            head.refuse(Status.UNIMPLEMENTED, text)
            head.refusal = HEADERS + trailers(Status.UNIMPLEMENTED, text) + ACCEPTED_ENCODINGS
            return
        head.encoding = encoding
        length = asked.get(b"content-length")
        if length is not None:
            head.length = int(length)
        timeout = asked.get(b"grpc-timeout")
        if timeout is not None:
            found = _TIMEOUT.fullmatch(timeout)
            if found is None:
                text = "grpc-timeout is not up to eight digits and one of the units H, M, S, m, u, n"
                head.refuse(Status.INVALID_ARGUMENT, text)
                return
            head.timeout_s = int(found[1]) * _UNITS_S[found[2]]
        try:
            head.metadata = _metadata(fields)
        except binascii.Error as error:
            head.refuse(Status.INVALID_ARGUMENT, f"the metadata cannot be read: {error}")

    def _not_found(self, path: bytes) -> str:
        """Return the sentence for a path that is none of a method, with what was probably meant."""
        service, slash, name = path[1:].decode(errors="replace").partition("/")
        if not slash:
            return f"expected a path /SERVICE/METHOD, got '/{service[:100]}'"
        if service in self._names:
            known = self._names[service]
            return f"the service {service} has no method '{name[:100]}'" + self._else(name, known)
        return f"unknown service '{service[:100]}'" + self._else(service, self._names)

    def _else(self, word: str, known: Collection[str]) -> str:
        if not self.guesses:
            return ""
        self.guesses -= 1
        return meant(word[:100], known) or f"; there is {', '.join(sorted(known))}"


def check_trailers(fields: Sequence[Field]) -> None:
    """Check fields that come after the messages; they are not used.

    Raises:
        Malformed: If they may not stand there.
    """
    for name, value in fields:
        if _NAME.fullmatch(name) is None or _BAD_VALUE.search(value) or value.strip(b" \t") != value:
            raise Malformed("the trailers hold a field that may not stand there")


def _sorted(fields: Sequence[Field]) -> dict[bytes, bytes]:
    """Return the fields by name, the first of each, checked as far as HTTP/2 asks for it."""
    found: dict[bytes, bytes] = {}
    is_regular = False
    for name, value in fields:
        if name[:1] == b":":
            if is_regular or name in found or name not in _PSEUDO:
                raise Malformed(f"{name[:50]!r} may not stand here")
        else:
            is_regular = True
            if _NAME.fullmatch(name) is None or name in _OF_HTTP_1 or (name == b"te" and value != b"trailers"):
                raise Malformed(f"a field may not be called {name[:50]!r} or have this value")
        if _BAD_VALUE.search(value) or value.strip(b" \t") != value:
            raise Malformed(f"the value of {name[:50]!r} holds characters that it may not hold")
        if found.setdefault(name, value) != value and name == b"content-length":
            raise Malformed("content-length appears twice, with different values")
    if not found.keys() >= {b":method", b":scheme", b":path"} or found[b":path"][:1] != b"/":
        raise Malformed("a request needs :method, :scheme and :path, which begins with a slash")
    length = found.get(b"content-length", b"0")
    if not length.isdigit() or len(length) > 18:
        raise Malformed(f"content-length: expected a number of at most 18 digits, got {length[:50]!r}")
    return found


def _is_grpc(content_type: bytes) -> bool:
    kind = content_type.lower()
    return kind == b"application/grpc" or kind.startswith((b"application/grpc+", b"application/grpc;"))


def _is_json(content_type: bytes) -> bool:
    return content_type.lower().partition(b";")[0].strip() == b"application/grpc+json"


def _metadata(fields: Sequence[Field]) -> Metadata:
    found: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        if name[:1] == b":" or name in _OWN or name.startswith(b"grpc-"):
            continue
        shown = name.decode()
        if name.endswith(b"-bin"):
            found.extend((shown, _binary(part.strip())) for part in value.split(b","))
        else:
            found.append((shown, value.decode(errors="replace")))
    return tuple(found)


def _binary(text: bytes) -> bytes:
    return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
