# SPDX-License-Identifier: Apache-2.0
"""Bodies that are right but for one spot, to the doors that make chats, ranks, audio and queries of them.

A *seed* is a valid body with all fields of its protocol. Each of its values is replaced by each odd value in turn:
those of other types, and texts, numbers and nestings that are no JSON or hardly any. Then it is cut, has fields twice,
and is sent as something else. Every answer is one of HTTP in the form of its protocol: what is wrong is refused, and
never the fault of the server. Some clients leave early. In the end nobody is left in the models.

    .venv/bin/python -m tests.fuzz.door_odd_bodies SECONDS SEED
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.attacks import doors
from tests.attacks.crowds import json_spots, put
from tests.fuzz.serving import Findings, Visitor, fuzz_door

DEEP = 3000
LONG = 20_000
ODD = (
    *(b"null", b"true", b"0", b"-1", b"1.5", b"1e999", b"-0", b"9" * 400, b"1" + b"0" * 30, b"18446744073709551615"),
    *(
        b'""',
        b'"x"',
        b'"auto"',
        b'"\\ud800"',
        b'"a\\u0000\\nb"',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"%b"' % ("€".encode() * LONG),
    ),
    *(b"NaN", b"-Infinity", b"01", b"'x'", b"{]", b"[", b"", b"\x00"),
    *(b"[]", b"[null]", b"[[]]", b"[{}]", b'["a"]', b"[1, 2]", b'[0,"a",{}]', b"[" + b"0," * DEEP + b"0]"),
    *(b"{}", b'{"x":1}', b'{"type":"x"}', b'{"type":"text","text":3}', b'{"type":"function","name":"f"}'),
    *(b'{"type":"text","type":null,"a":1,"a":2}', b'{"\\ud800":1}', b'{"":{"":[{}]}}', b'{\n"a":\n1}'),
    *(b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP, b"[" * LONG),
)
MEDIA = (
    *(
        "",
        "text/plain",
        "application/json; charset=latin-1",
        "application/msgpack",
        "application/x-www-form-urlencoded",
    ),
    *(
        "multipart/form-data; boundary=b",
        "application/octet-stream",
        "image/png",
        "application/json, text/html",
        "\xff",
    ),
)
QUERIES = (
    *(
        "size=x",
        "size=",
        "size=9e9",
        "size=" + "9" * 400,
        "size=1&size=2",
        "size=%ff",
        "size=%00",
        "size",
        "=",
        "&&&",
        "size=true",
    ),
    *(
        "ratio=nan",
        "ratio=inf",
        "ratio=-1e999",
        "is_new=2",
        "is_new=",
        "tags=a&tags=b",
        "tags=%ud800",
        "text=%ed%a0%80",
    ),
    *("other=1", "more.size=1", "size[]=1", "%00=1", "text=" + "a" * 5000, "&".join(["tags=a"] * 200), "text=null"),
    *("&".join(f"a{number}=1" for number in range(300)), "size=1;ratio=2", "text=%", "a=b=c"),
)
"""Queries of a POST whose body says the rest."""
TARGET = Path(__file__).parents[1] / "models" / "crowded.py"
OPTIONS = ("--worker-kind", "thread", "--max-body-bytes", "200000")
_PLACEHOLDER = "\x00odd\x00"


JSON = {"content-type": "application/json"}
FORM = {"content-type": "multipart/form-data; boundary=b"}


class Sent(NamedTuple):
    """One request.

    Attributes:
        spot: What is odd about it.
    """

    spot: str
    body: bytes
    headers: dict[str, str] = JSON
    query: str = ""


class Door(NamedTuple):
    """Where bodies are sent.

    Attributes:
        is_error: Tells whether a body is an error in the form of the protocol.
        is_form: Whether bodies are forms, of which the seed has the fields.
    """

    target: str
    seed: dict[str, Any]
    is_error: Callable[[Any], bool]
    is_form: bool = False


def _is_openais(error: Any) -> bool:
    return error.keys() == {"error"} and error["error"].keys() == {"message", "type", "param", "code"}


def _is_anthropics(error: Any) -> bool:
    is_error = error.keys() == {"type", "error", "request_id"} and error["type"] == "error"
    return is_error and error["error"].keys() == {"type", "message"}


def _is_native(error: Any) -> bool:
    return error.keys() == {"error"} and {"code", "message"} <= error["error"].keys()


DOORS = (
    Door("/v1/responses", doors.RESPONSE, _is_openais),
    Door("/v1/messages", doors.MESSAGES, _is_anthropics),
    Door("/v1/rerank", doors.RANKING, _is_openais),
    Door("/v2/rerank", {**doors.RANKING, "return_documents": False}, _is_openais),
    Door("/v1/score", doors.SCORES, _is_openais),
    Door("/score", doors.PAIRS, _is_openais),
    Door("/v1/audio/speech", doors.SPEECH, _is_openais),
    Door("/v1/audio/transcriptions", doors.RECORDING, _is_openais, is_form=True),
    Door("/v1/audio/transcriptions", {**doors.RECORDING, "stream": "true"}, _is_openais, is_form=True),
    Door("/models/asked", doors.PAGE, _is_native),
)


def requests(door: Door) -> Iterator[Sent]:
    """Requests to a door that are odd at one spot each."""
    if door.is_form:
        yield from _forms({name: value.encode() for name, value in door.seed.items()})
        return
    seeds = [door.seed, {**door.seed, "stream": True}] if "stream" in door.seed else [door.seed]
    for seed in seeds:
        written = json.dumps(seed).encode()
        yield Sent("nothing", written)
        for path in ((), *json_spots(seed)):
            spoiled = json.dumps(put(seed, path, _PLACEHOLDER)).encode()
            for value in ODD:
                body = spoiled.replace(json.dumps(_PLACEHOLDER).encode(), value)
                yield Sent(f"{'.'.join(map(str, path))}: {value[:20]!r}", body)
        yield from _framed(written, [*seed])
        if door.is_error is _is_native:
            yield from (Sent(query[:20], written, query=f"?{query}") for query in QUERIES)


def _forms(seed: dict[str, bytes]) -> Iterator[Sent]:
    """Forms that are odd at one spot each: a value, a name, a field that is there twice or is a file, or the frame."""
    fields = [*seed.items()]
    body = _form(fields)
    yield Sent("nothing", body, FORM)
    for name in (*seed, "zz", "zz[]", "\n", "€" * 200):
        for value in ODD:
            yield Sent(f"{name}: {value[:20]!r}", _form([*(seed | {name: value}).items()]), FORM)
        yield Sent(f"{name} twice", _form([*fields, (name, b"x")]), FORM)
        yield Sent(f"{name} left out", _form([field for field in fields if field[0] != name]), FORM)
        yield Sent(f"{name} as a file", _form(fields, file=name), FORM)
    for at in range(0, len(body), max(1, len(body) // 40)):
        yield Sent(f"model? cut at {at}", body[:at], FORM)
        yield Sent(f"model? more at {at}", body[:at] + b'"' + body[at:], FORM)
    for media in (*MEDIA, "application/json", "multipart/form-data", "multipart/form-data; boundary=", "multipart/x"):
        yield Sent(f"media {media!r}", body, {"content-type": media} if media else {})
    for coding, data in (
        ("gzip", body),
        ("gzip", gzip.compress(body)[:-9]),
        ("gzip", gzip.compress(body)),
        ("br", body),
    ):
        yield Sent(f"coding {coding}", data, {"content-encoding": coding, **FORM})


def _form(fields: list[tuple[str, bytes]], file: str = "file") -> bytes:
    parts = [
        b'--b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        % (name.encode(), b'; filename="a"' if name == file else b"", value)
        for name, value in fields
    ]
    return b"".join([*parts, b"--b--\r\n"])


def _framed(body: bytes, names: list[str]) -> Iterator[Sent]:
    """Requests whose bodies are cut, have a field twice, or are said to be something else."""
    for at in range(0, len(body), max(1, len(body) // 40)):
        yield Sent(f"cut at {at}", body[:at])
        yield Sent(f"more at {at}", body[:at] + b'"' + body[at:])
    for name in names:
        for value in (b"null", b"[]", b'"x"', b"3"):
            yield Sent(f"{name} twice, first {value!r}", b'{"%b":%b,' % (name.encode(), value) + body[1:])
            yield Sent(f"{name} twice, last {value!r}", body[:-1] + b',"%b":%b}' % (name.encode(), value))
    for media in MEDIA:
        yield Sent(f"media {media!r}", body, {"content-type": media} if media else {})
    for coding, data in (("gzip", body), ("gzip", gzip.compress(body)[:-9]), ("br", body), ("gzip", b"")):
        yield Sent(f"coding {coding}", data, {"content-encoding": coding, **JSON})


def fault(door: Door, spot: str, status: int, media: str, body: bytes) -> str:
    """What is wrong with an answer; empty if nothing is."""
    try:
        if status // 100 == 2 and media.startswith(("audio/", "text/plain")):
            return ""
        if status // 100 == 2 and media.startswith("text/event-stream"):
            return _fault_of_stream(door, body)
        told = json.loads(body.decode(), parse_constant=_refused)
    except (ValueError, KeyError, AttributeError) as error:
        return f"it cannot be read: {error!r}"
    if status // 100 == 2:
        return ""
    if status not in {400, 413, 415, 422} and not (status == 404 and spot.startswith("model")):
        return f"the status is {status}"
    return "" if door.is_error(told) else "its error has another form"


def _fault_of_stream(door: Door, body: bytes) -> str:
    is_error = False
    *events, rest = body.decode().split("\n\n")
    for event in events:
        *name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "), parse_constant=_refused)
        is_error = door.is_error(told) if name in ([], ["event: error"]) else False
        if not is_error and name != ([] if door.is_form else [f"event: {told['type']}"]):
            return f"an event has another name: {event[:300]}"
    if rest or not events:
        return "it has no end"
    ends = ('"response.completed"', '"response.incomplete"', '"message_stop"', '"transcript.text.done"')
    is_over = any(end in events[-1] for end in ends)
    return "" if is_over or is_error else "its last event is no end"


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class Client(Visitor):
    """Sends all of them in an order of its own, again and again."""

    def __init__(self, findings: Findings, port: int, dice: random.Random) -> None:
        super().__init__(findings, port, dice)
        self._left: list[tuple[Door, Sent]] = []

    def round(self) -> None:
        """One request."""
        if not self._left:
            self._left = [(door, sent) for door in DOORS for sent in requests(door)]
            self.dice.shuffle(self._left)
        door, sent = self._left.pop()
        answer = self.post(door.target + sent.query, sent.body, sent.headers)
        if answer is not None and (said := fault(door, sent.spot, *answer)):
            self.findings.differ(f"{door.target}, {sent.spot}: {said}", *answer, sent.body)


def main(seconds: float, seed: int) -> int:
    """Fuzz for a time; returns how many differences there were."""
    return fuzz_door(Findings("odd bodies"), TARGET, (seconds, seed), Client, OPTIONS)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
