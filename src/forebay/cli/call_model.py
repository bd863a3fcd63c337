# SPDX-License-Identifier: Apache-2.0
"""`forebay call URL [DATA]`: send a file or JSON to a model and see the answer."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead, InvalidURL, RemoteDisconnected
from typing import Any, Final
from urllib import error, request

from forebay.cli.numbers import between, seconds
from forebay.cli.request_body import HELP, body_of
from forebay.cli.request_head import add_header_flags, headers_of, url_of
from forebay.errors import ConfigError
from forebay.observe.logs.colors import has_colors, red
from forebay.remote_servers.whole_head import WholeHeadResponse

DESCRIPTION = f"""\
Send one request and print the answer. DATA is one of

{HELP}
Without DATA the URL is fetched with GET.
"""

_PIECE_BYTES: Final = 65_536
_LONGEST_NUMBER: Final = 16


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("call", help="send a request and print the answer", description=DESCRIPTION)
    parser.add_argument("url", metavar="URL", help="such as localhost:8080/models/iris")
    parser.add_argument("data", metavar="DATA", nargs="*", help="the body to send")
    add_header_flags(parser)
    parser.add_argument(
        "--timeout-s", type=seconds(0.01, 86_400), default=60.0, metavar="S", help="give up after this time (60)"
    )
    parser.add_argument(
        "--retries",
        type=between(int, 0, 1000),
        default=0,
        metavar="N",
        help="send again up to N times, when the server says so (Retry-After) and within --timeout-s (0)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Send and print; the exit status is 0 for a 2xx answer and 1 for any other."""
    message, left = _request(parsed), parsed.retries
    while (status := _send(parsed, message, left)) is None:
        left -= 1
    return status


def _send(parsed: argparse.Namespace, message: request.Request, retries: int) -> int | None:
    """Send once and print; returns None after a refusal, once it is time to send again."""
    started = time.perf_counter()
    try:
        with request.build_opener(_Http, _Https).open(message, timeout=parsed.timeout_s) as answer:
            return _show(answer, started)
    except error.HTTPError as answer:
        wait_s = _retry_s(answer)
        if wait_s is not None and retries and wait_s <= parsed.timeout_s:
            answer.close()
            sys.stderr.write(f"{answer.status}, retrying in {wait_s:g} s\n")
            time.sleep(wait_s)
            return None
        status = _show(answer, started)
        if wait_s is not None:
            sys.stderr.write(f"the server says to try again in {wait_s:g} s; --retries N does so\n")
        return status
    except InvalidURL as failure:
        raise ConfigError(f"{parsed.url!r} is not a URL: {failure}") from failure
    except IncompleteRead as failure:
        raise ConfigError(f"{parsed.url} broke off its answer") from failure
    except RemoteDisconnected as failure:
        raise ConfigError(f"{parsed.url} closed the connection and did not answer") from failure
    except HTTPException as failure:
        raise ConfigError(f"{parsed.url} answers, but not in HTTP: {str(failure).strip()[:100]!r}") from failure
    except BrokenPipeError:  # of what is printed: where a request breaks off it is a URLError
        raise
    except (error.URLError, TimeoutError, ConnectionError) as failure:
        raise ConfigError(f"{parsed.url} does not answer: {reason_of(failure)}") from failure


def _retry_s(answer: error.HTTPError) -> float | None:
    """Return the seconds after which a server that refused wants to be asked again; None if it does not say."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        told = (answer.headers.get(name) or "").strip()
        if told.isascii() and told.isdigit() and len(told) < _LONGEST_NUMBER:
            return int(told) * unit_s
    return None


class _HttpConnection(HTTPConnection):
    response_class = WholeHeadResponse


class _HttpsConnection(HTTPSConnection):
    response_class = WholeHeadResponse


class _Http(request.HTTPHandler):
    def http_open(self, req: request.Request) -> Any:
        return self.do_open(_HttpConnection, req)


class _Https(request.HTTPSHandler):
    def https_open(self, req: request.Request) -> Any:
        return self.do_open(_HttpsConnection, req)


def reason_of(failure: Exception) -> Any:
    """Return what a person wants to know of a call that came to nothing."""
    reason: Any = getattr(failure, "reason", failure)
    return getattr(reason, "strerror", None) or reason


def _request(parsed: argparse.Namespace) -> request.Request:
    body, media_type = body_of(parsed.data)
    url, headers = url_of(parsed.url).geturl(), headers_of(parsed, media_type)
    return request.Request(url, data=body, headers=headers)  # noqa: S310 - http or https


def _show(answer: Any, started: float) -> int:
    media_type = answer.headers.get_content_type()
    status = str(answer.status)
    note = [red(status) if answer.status >= 400 and has_colors(sys.stderr) else status, media_type]
    if media_type == "text/event-stream":
        sys.stderr.write(" ".join(note) + "\n")
        for line in _lines(answer):
            if line.strip():
                sys.stdout.write(line.decode(errors="replace") + "\n")
                sys.stdout.flush()
    else:
        body = answer.read()
        milliseconds = (time.perf_counter() - started) * 1000
        sys.stderr.write(" ".join([*note, f"{len(body)} bytes", f"{milliseconds:.1f} ms"]) + "\n")
        _print(body, media_type)
    return 0 if answer.status < 300 else 1


def _lines(answer: Any) -> Iterator[bytes]:
    """Return the lines of a stream as they come; those of the response itself just end where it breaks off.

    Raises:
        IncompleteRead: If it breaks off.
    """
    begun = b""
    while piece := answer.read1(_PIECE_BYTES):
        *lines, begun = (begun + piece).split(b"\n")
        yield from lines
    if begun:
        yield begun


def _print(body: bytes, media_type: str) -> None:
    if media_type == "application/json":
        try:
            body = json.dumps(json.loads(body), indent=2, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            pass
    sys.stdout.buffer.write(body)
    if media_type.startswith("text/") or media_type == "application/json":
        sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
