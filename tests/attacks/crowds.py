# SPDX-License-Identifier: Apache-2.0
"""Bodies that hold very many small elements, wherever the schema of a protocol has room for them.

A *seed* is a valid body. An *attack* is the seed with one spot taken by a crowd: a million elements of a byte or two,
of which a reader makes as many objects. Spots of JSON are all values of the seed, its containers, and a member of no
name that is known in each object. Those of a protobuf message are all of its fields, of the messages within it, and a
field of no known number in each.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

CROWD = 1_050_000
"""Elements of an attack: more than a request may have outside its tensors."""
MAX_DEPTH = 5
"""Messages within messages that are gone into; some hold themselves."""
UNKNOWN = "zz"
UNKNOWN_FIELD = 1999


class Attack(NamedTuple):
    """One body to send.

    Attributes:
        spot: Where the crowd is, and what it is of.
        body: What is sent.
        size: Bytes of it once unpacked.
        is_packed: Whether it is gzip.
    """

    spot: str
    body: bytes
    size: int
    is_packed: bool = False


def packed(attack: Attack) -> Attack:
    """The same, as gzip."""
    return attack._replace(spot=f"{attack.spot}, gzip", body=gzip.compress(attack.body, 1), is_packed=True)


# ---------------------------------------------------------------------------------------------------------------------
# JSON

PLACEHOLDER = "\x00crowd\x00"


@cache
def names(count: int) -> list[str]:
    """Short names, each another."""
    return [f"{number:x}" for number in range(count)]


def _listed(element: str, count: int = CROWD) -> bytes:
    return b"[" + (element.encode() + b",") * (count - 1) + element.encode() + b"]"


def _members(value: str) -> bytes:
    return ("{" + ",".join(f'"{name}":{value}' for name in names(CROWD)) + "}").encode()


JSON_CROWDS = {
    "numbers": lambda: _listed("0"),
    "fractions": lambda: _listed("0.5"),
    "texts": lambda: _listed('""'),
    "nulls": lambda: _listed("null"),
    "lists": lambda: _listed("[]"),
    "objects": lambda: _listed("{}"),
    "lists of one": lambda: _listed("[0]"),
    "objects of one": lambda: _listed('{"a":0}'),
    "members": lambda: _members("0"),
    "members of lists": lambda: _members("[]"),
    "one member again and again": lambda: b"{" + b'"a":0,' * (CROWD - 1) + b'"a":0}',
    "lists in lists": lambda: b"[" * CROWD + b"]" * CROWD,
    "pairs": lambda: _listed("[0,0]", CROWD // 2),
}
"""What makes a value of JSON with so many elements."""


@cache
def json_crowd(kind: str) -> bytes:
    """One of these values, made once."""
    return JSON_CROWDS[kind]()


def json_spots(seed: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values below the whole, and of a member that is not known in each object."""
    if isinstance(seed, dict):
        yield (*path, UNKNOWN)
        for name, value in seed.items():
            yield (*path, name)
            yield from json_spots(value, (*path, name))
    elif isinstance(seed, list):
        for number, value in enumerate(seed[:1]):
            yield (*path, number)
            yield from json_spots(value, (*path, number))


def put(seed: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The seed with another value at a spot."""
    if not path:
        return value
    found = seed.copy()
    if isinstance(seed, dict):
        found[path[0]] = put(seed.get(path[0]), path[1:], value)
    else:
        found[path[0]] = put(seed[path[0]], path[1:], value)
    return found


def json_attack(seed: Any, path: tuple[Any, ...], kind: str) -> Attack:
    """The seed with a crowd at a spot."""
    text = json.dumps(put(seed, path, PLACEHOLDER)).encode()
    body = text.replace(json.dumps(PLACEHOLDER).encode(), json_crowd(kind))
    return Attack(f"{'.'.join(map(str, path)) or 'the whole'}: {kind}", body, len(body))


# ---------------------------------------------------------------------------------------------------------------------
# protobuf


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def field(number: int, data: bytes) -> bytes:
    """A field with its length."""
    return varint(number << 3 | 2) + varint(len(data)) + data


class Spot(NamedTuple):
    """A field of a message, and the numbers of the fields that lead to it.

    Attributes:
        path: Of the fields around it.
        name: Its names, from the outside.
        number: Its own number.
        kind: `message`, `text`, `map`, or the bytes of a number.
    """

    path: tuple[int, ...]
    name: str
    number: int
    kind: str


def proto_spots(message: Any, path: tuple[int, ...] = (), name: str = "") -> Iterator[Spot]:
    """All fields of a message, given by its descriptor, and of the messages within."""
    yield Spot(path, f"{name}unknown", UNKNOWN_FIELD, "number")
    if len(path) == MAX_DEPTH:
        return
    for one in message.fields:
        inner = one.message_type
        is_map = inner is not None and inner.GetOptions().map_entry
        if inner is None:
            kind = "text" if one.type in {one.TYPE_STRING, one.TYPE_BYTES} else _width(one)
        else:
            kind = "map" if is_map else "message"
        yield Spot(path, name + one.name, one.number, kind)
        if inner is None:
            continue
        if is_map and inner.fields_by_number[2].message_type is not None:
            # The empty key, and the value within the entry.
            value = inner.fields_by_number[2].message_type
            yield from proto_spots(value, (*path, one.number, 2), f"{name}{one.name}.")
        elif not is_map and inner is not message:
            yield from proto_spots(inner, (*path, one.number), f"{name}{one.name}.")


def _width(one: Any) -> str:
    if one.type in {one.TYPE_DOUBLE, one.TYPE_FIXED64, one.TYPE_SFIXED64}:
        return "eight bytes"
    return "four bytes" if one.type in {one.TYPE_FLOAT, one.TYPE_FIXED32, one.TYPE_SFIXED32} else "number"


def _unpacked(wire: int, zero: bytes) -> Callable[[int], bytes]:
    return lambda number: (varint(number << 3 | wire) + zero) * CROWD


def _packed(zero: bytes) -> Callable[[int], bytes]:
    return lambda number: field(number, zero * CROWD)


def _repeated(element: bytes, count: int = CROWD) -> Callable[[int], bytes]:
    return lambda number: field(number, element) * count


def _entries(number: int) -> bytes:
    return b"".join(field(number, field(1, name.encode())) for name in names(CROWD))


PROTO_CROWDS: dict[str, dict[str, Callable[[int], bytes]]] = {
    "number": {"unpacked": _unpacked(0, b"\0"), "packed": _packed(b"\0")},
    "four bytes": {"unpacked": _unpacked(5, bytes(4)), "packed": _packed(bytes(4))},
    "eight bytes": {"unpacked": _unpacked(1, bytes(8)), "packed": _packed(bytes(8))},
    "map": {"empty entries": _repeated(b""), "entries": _entries},
    "text": {"empty": _repeated(b""), "of a byte": _repeated(b"x", CROWD // 2)},
    "message": {"empty": _repeated(b""), "with a field": _repeated(b"\x08\0", CROWD // 2)},
}
"""By the kind of a field, what it may hold of a crowd."""


def proto_attack(prefix: bytes, spot: Spot, kind: str) -> Attack:
    """A message that begins as a valid one, with a crowd at a spot."""
    body = PROTO_CROWDS[spot.kind][kind](spot.number)
    for number in reversed(spot.path):
        body = field(number, body)
    return Attack(f"{spot.name}: {kind}", prefix + body, len(prefix) + len(body))


# ---------------------------------------------------------------------------------------------------------------------
# msgpack, forms

_ARRAY, _MAP = b"\xdd", b"\xdf"
MSGPACK_CROWDS = {
    "numbers": lambda: _ARRAY + CROWD.to_bytes(4) + b"\0" * CROWD,
    "texts": lambda: _ARRAY + CROWD.to_bytes(4) + b"\xa0" * CROWD,
    "lists": lambda: _ARRAY + CROWD.to_bytes(4) + b"\x90" * CROWD,
    "maps": lambda: _ARRAY + CROWD.to_bytes(4) + b"\x80" * CROWD,
    "lists in lists": lambda: b"\x91" * CROWD + b"\xc0",
    "one member again and again": lambda: _MAP + CROWD.to_bytes(4) + b"\xa0\0" * CROWD,
}
"""What makes a value of msgpack with so many elements."""
FORM_CROWDS = {
    "fields of a form": ("application/x-www-form-urlencoded", lambda: b"a=&" * CROWD),
    "empty fields of a form": ("application/x-www-form-urlencoded", lambda: b"&" * CROWD),
    "parts of a form": (
        "multipart/form-data; boundary=b",
        lambda: b"--b\r\ncontent-disposition: form-data; name=a\r\n\r\n\r\n" * (CROWD // 4) + b"--b--\r\n",
    ),
    "headers of a part": (
        "multipart/form-data; boundary=b",
        lambda: b"--b\r\ncontent-disposition: form-data; name=a\r\n" + b"a:\r\n" * CROWD + b"\r\n\r\n--b--\r\n",
    ),
}
"""Media types of forms, and what makes forms with so many fields."""
