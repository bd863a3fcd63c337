# SPDX-License-Identifier: Apache-2.0
"""Records what the original ventu answers with the project `tests/compat/ventu/projects/lengths.py`.

    .venv/bin/python -m tests.originals.ventu.record http-json > tests/originals/ventu/http-json.json

Likewise `http-msgpack`, `jobs-json` and `jobs-msgpack`. Jobs go to a worker by the batching service's protocol: `jobs`
has the body of each in base64; the answer has that of each, and which of them are errors.
"""

import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import msgspec
from tests.compat.ventu.conftest import LENGTHS, ORIGINAL, Front
from tests.originals.replay import recorded
from tests.ports import free_port
from tests.waiting import PATIENCE_S, eventually

COMMAND = "ventu 0.4.5, python -m tests.originals.ventu.record"
CODECS = {"json": msgspec.json, "msgpack": msgspec.msgpack}
PATH = "/inference"

VALUES = {
    "valid": {"text": "hello"},
    "not ascii": {"text": "häuser 東京"},
    "with more": {"text": "hello", "other": [1, None, 2.5]},
    "a number for a text": {"text": 12},
    "a fraction for a text": {"text": 1.5},
    "a truth for a text": {"text": True},
    "short": {"text": "x"},
    "long": {"text": "x" * 101},
    "missing": {"txt": "hello"},
    "no text": {"text": ["a"]},
    "null for a text": {"text": None},
    "an empty object": {},
    "a list": [1],
    "an empty list": [],
    "a number": 1,
    "a text": "hello",
    "a truth": True,
    "nothing": None,
}
RAW = {
    "json": {
        "no body": b"",
        "half a body": b'{"text": "he',
        "half a word": b"nul",
        "two values": b"{} {}",
        "a name given twice": b'{"text": "first", "text": "second"}',
        "not a number": b'{"text": NaN}',
        "no utf-8": b'{"text": "\xff\xfe"}',
        "a mark of the byte order": b'\xef\xbb\xbf{"text": "hello"}',
    },
    "msgpack": {
        "no body": b"",
        "a byte that means nothing": b"\xc1",
        "half a body": b"\x81\xa4text\xa5he",
        "two values": b"\x81\xa4text\xa5hello\xc0",
        "a number for a name": b"\x81\x01\xa5hello",
        "bytes for a name": b"\x81\xc4\x04text\xa5hello",
        "bytes for a text": b"\x81\xa4text\xc4\x05hello",
        "no utf-8": b"\x81\xa4text\xa2\xff\xfe",
        "a name given twice": b"\x82\xa4text\xa5first\xa4text\xa6second",
    },
}
PATHS = {
    "the root": ("GET", "/"),
    "health": ("GET", "/health"),
    "inference without a body": ("GET", "/inference"),
    "no path": ("GET", "/nope"),
    "a slash behind": ("GET", "/health/"),
    "a page that is not there": ("GET", "/apidoc/nope"),
    "to send to the root": ("POST", "/"),
    "options of the root": ("OPTIONS", "/"),
    "to delete the root": ("DELETE", "/"),
    "to put": ("PUT", "/inference"),
    "options": ("OPTIONS", "/inference"),
}
TYPES = {
    "another type": "text/csv",
    "json with a charset": "application/json; charset=utf-8",
    "msgpack": "application/msgpack",
}
DEADLY = {
    "json": ("long", "no utf-8"),
    "msgpack": ("long", "no body", "half a body", "a number for a name", "bytes for a name", "no utf-8"),
}
"""Jobs that end the original's worker."""
ENDS = "an unreadable body, or a model that raises, ends the worker (B76, B77)"
NULL = "`null` as a body over HTTP is an object without fields"
WORDS = "what it says of a body that is no msgpack is its library's"
DIFFERS: dict[str, dict[str, dict[str, str]]] = {
    f"jobs-{codec}": {f"alone: {name}": {"": ENDS} for name in names} for codec, names in DEADLY.items()
} | {
    "http-json": {
        "nothing": {"json": NULL},
        "a mark of the byte order": {"": "JSON behind a mark of the byte order is refused"},
    },
    "http-msgpack": {
        "nothing": {"base64": NULL},
        "a byte that means nothing": {"json.description": WORDS},
        "half a body": {"json.description": WORDS},
        "two values": {"json.description": WORDS},
        "a number for a name": {"json.description": WORDS},
        "bytes for a name": {"": "a name that is no text fails or ends the request, and the worker"},
    },
}
DIFFERS["jobs-msgpack"] |= {
    "all": {"answers[17]": WORDS, "answers[18]": WORDS},
    "back": {"answers[2]": WORDS, "answers[3]": WORDS},
}
"""What we answer otherwise, by recording and name: the places, and the row of the README that gives the reason."""


def bodies(codec):
    """All bodies, by name."""
    return {name: CODECS[codec].encode(value) for name, value in VALUES.items()} | RAW[codec]


def requests(codec):
    """All requests over HTTP, by name."""
    usual = "application/msgpack" if codec == "msgpack" else "application/json"

    def post(body, media=usual):
        coded = {"base64": base64.b64encode(body).decode()} if codec == "msgpack" else {"text": body.decode("latin-1")}
        if codec == "json" and not body.isascii():
            coded = {"base64": base64.b64encode(body).decode()}
        return {"method": "POST", "path": PATH, "headers": {"content-type": media}, **coded}

    asked = {name: post(body) for name, body in bodies(codec).items()}
    for name, media in TYPES.items():
        asked[f"said to be {name}"] = post(bodies(codec)["valid"], media)
    for name, (method, path) in PATHS.items():
        asked[name] = {"method": method, "path": path, "headers": {"content-type": usual}}
    return asked


def batches(codec):
    """Names of the jobs of each batch."""
    usual = [name for name in bodies(codec) if name not in DEADLY[codec]]
    alone = {f"alone: {name}": [name] for name in DEADLY[codec]}
    return {
        "all": usual,
        "one": ["valid"],
        "wrong": ["short"],
        "many": ["valid", "short"] * 9,
        "back": usual[::-1],
        **alone,
    }


@contextlib.contextmanager
def original(*arguments, codec):
    """The original in a process, with its log."""
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, "MSGPACK": "1"} if codec == "msgpack" else {**os.environ}
        command = [str(ORIGINAL), str(LENGTHS), *map(str, arguments)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield
        finally:
            process.kill()
            process.wait()


def over_http(codec):
    port = free_port()
    with (
        original("http", port, codec=codec),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client,
    ):

        def is_up():
            with contextlib.suppress(httpx.TransportError):
                return client.get("/").status_code == 200

        eventually(is_up, "the original")
        headers = {"content-type": "", "allow": ""}
        for name, request in requests(codec).items():
            answer = recorded(client, request, {"headers": headers, "text": ""})
            if answer["text"]:
                answer = recorded(client, request, {"headers": headers})
            yield name, request, answer


def by_socket(codec):
    for name, jobs in batches(codec).items():
        request = {"jobs": [base64.b64encode(bodies(codec)[job]).decode() for job in jobs]}
        with tempfile.TemporaryDirectory() as folder:
            front = Front(str(Path(folder) / "batch.socket"))
            with original("unix", front.listener.getsockname(), codec=codec):
                front.accept()
                answer = answer_of(front, request)
            front.close()
        yield name, request, answer


def answer_of(front, request):
    """The answer to a batch, in the form of a recording; `null` where the worker has ended."""
    try:
        found, errors = front.ask(*map(base64.b64decode, request["jobs"]))
    except EOFError:
        return {"answers": None}
    return {"answers": [_shown(one) for one in found], "errors": errors}


def _shown(answer):
    if answer is None:  # it is left out
        return None
    return {"text": answer} if isinstance(answer, str) else {"base64": base64.b64encode(answer).decode()}


def main(which):
    kind, codec = which.split("-")
    lines = []
    for name, request, answer in (over_http if kind == "http" else by_socket)(codec):
        told = {"name": name, "request": request, "answer": answer}
        if name in DIFFERS.get(which, {}):
            told["differs"] = DIFFERS[which][name]
        lines.append(json.dumps(told, default=float))
    text = ",\n".join(lines)
    print(f'{{"source": {json.dumps(f"{COMMAND} {which}")}, "exchanges": [\n{text}\n]}}')


if __name__ == "__main__":
    main(sys.argv[1])
