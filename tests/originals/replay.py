# SPDX-License-Identifier: Apache-2.0
"""Reads recordings of the originals and compares our answers with them; README.md describes the format."""

import base64
import json
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_ABSENT = object()


@dataclass(frozen=True)
class Exchange:
    """A request to the original, and its answer."""

    name: str
    source: str
    request: dict[str, Any]
    answer: dict[str, Any]
    varies: tuple[str, ...] = ()
    differs: dict[str, str] = field(default_factory=dict[str, str])


def exchanges(path):
    """The exchanges of a recording, as parameters of a test."""
    told = read_json((HERE / path).read_bytes())
    found = []
    for one in told["exchanges"]:
        source = f"{told['source']} {one.get('source', '')}".rstrip()
        exchange = Exchange(
            one["name"],
            source,
            one["request"],
            one["answer"],
            tuple(one.get("varies", ())),
            one.get("differs", {}),
        )
        found.append(pytest.param(exchange, id=exchange.name))
    names = [one.values[0].name for one in found]
    assert len(names) == len(set(names)), f"{path} names an exchange twice"
    return found


def sent(client, exchange):
    """Sends a recorded request over HTTP; returns the answer in the form of a recording."""
    return recorded(client, exchange.request, exchange.answer)


def recorded(client, request, like=None):
    """Sends a request over HTTP and returns the answer in the form of a recording, with the headers of another one."""
    kind = {"content-type": "application/json"} if "json" in request else {}
    headers = {**kind, **request.get("headers", {})}
    told = client.request(request["method"], request["path"], headers=headers, content=_body(request))
    names = {"content-type"} if like is None else like.get("headers", {})
    answer: dict[str, Any] = {"status": told.status_code}
    if headers := {name: told.headers[name] for name in names if name in told.headers}:
        answer["headers"] = headers
    kind = _kind(like) if like is not None else None
    is_json = "json" in told.headers.get("content-type", "") if kind is None else kind == "json"
    if is_json:
        answer["json"] = read_json(told.content)
    elif told.content or kind is not None:
        is_text = kind == "text" or (kind is None and _is_text(told.content))
        name, body = ("text", told.text) if is_text else ("base64", base64.b64encode(told.content).decode())
        answer[name] = body
    return answer


def assert_as_recorded(exchange, found, page=None):
    """Compares an answer field by field; `page` has the table of differences."""
    unlike = list(_unlike("", exchange.answer, found, exchange.varies))
    stale = [place for place in exchange.differs if not any(_is_below(at, place) for at, _ in unlike)]
    assert not stale, f"{exchange.source}: {stale} agree by now; remove them from `differs`"
    wrong = [text for at, text in unlike if not any(_is_below(at, place) for place in exchange.differs)]
    assert not wrong, f"{exchange.source}:\n" + "\n".join(wrong[:20])
    for reason in exchange.differs.values():
        assert page is not None, "a deliberate difference is explained on a page"
        assert f"\n| {reason} |" in (ROOT / page).read_text(), f"{page} has no row '{reason}' in its table"


def read_json(data):
    """Reads JSON with its numbers as they are written."""
    return json.loads(data, parse_float=Decimal, parse_constant=str)


def _unlike(place, expected, found, varies):
    """Yields where two values differ, and how."""
    if expected is not _ABSENT and found is not _ABSENT:
        if place in varies:
            return
        if isinstance(expected, dict) and isinstance(found, dict):
            for name in [*expected, *(name for name in found if name not in expected)]:
                inner = f"{place}.{name}" if place else name
                yield from _unlike(inner, expected.get(name, _ABSENT), found.get(name, _ABSENT), varies)
            return
        if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
            for number, pair in enumerate(zip(expected, found, strict=True)):
                yield from _unlike(f"{place}[{number}]", *pair, varies)
            return
        if _plain(expected) == _plain(found) and isinstance(expected, bool) == isinstance(found, bool):
            return
    yield place, f"{place}: the original has {_shown(expected)}, and we have {_shown(found)}"


def _plain(value):
    return Decimal(str(value)) if isinstance(value, float) else value


def _is_below(place, above):
    return place == above or place.startswith((f"{above}.", f"{above}[")) or above == ""


def _shown(value):
    return "nothing" if value is _ABSENT else str(value)[:500]


def _body(request):
    kind = _kind(request)
    if kind is None:
        return None
    body = request[kind]
    if kind == "json":
        return json.dumps(body, default=float).encode()
    return body.encode() if kind == "text" else base64.b64decode(body)


def _kind(message):
    return next((kind for kind in ("json", "text", "base64") if kind in message), None)


def _is_text(body):
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
