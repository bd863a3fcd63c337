# SPDX-License-Identifier: Apache-2.0
"""`forebay explain-refusal REQUEST_ID [URL]`: why a server refused a request."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

from forebay.cli.request_head import add_key_flag
from forebay.cli.server_page import PageMissing, page_of
from forebay.observe.logs.noted_refusals import RefusalReport

DESCRIPTION = """\
Print why a server rejected a request: the limit, the queue ahead of it, the predicted time. REQUEST_ID is the
X-Request-Id of the answer, over gRPC a trailer. A server keeps the last 64 rejections of each tenant and reason.
"""

TRIES: Final = 31
"""Each front of a server knows what it has refused itself, and a new connection may reach another one."""

_WHY: Final = {
    "full": "the queue was full",
    "share": "the tenant had its share of a full queue",
    "late": "its answer would have come after its deadline, or its time was over in the queue",
    "unavailable": "the server could not answer then",
}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "explain-refusal", help="explain why a server rejected a request", description=DESCRIPTION
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the X-Request-Id of the answer")
    parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8080", help="of the server")
    add_key_flag(parser)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Ask and print."""
    for line in lines_of_refusal(_asked(parsed)):
        sys.stdout.write(line + "\n")
    return 0


def _asked(parsed: argparse.Namespace) -> RefusalReport:
    path = f"refusals/{quote(parsed.request_id, safe='')}"
    for _ in range(TRIES):
        with contextlib.suppress(PageMissing):
            return page_of(parsed.url, path, parsed.api_key, RefusalReport)
    return page_of(parsed.url, path, parsed.api_key, RefusalReport)


def lines_of_refusal(refusal: RefusalReport) -> Iterator[str]:
    """Say in sentences why a request was refused."""
    whose = f" of {refusal.tenant} (class {refusal.tier})" if refusal.tenant else ""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(refusal.at))
    version = f", version {refusal.version}" if refusal.version else ""
    yield f"request {refusal.id}{whose} to {refusal.endpoint}{version}, refused at {at}"
    yield f"reason: {refusal.reason}: {_WHY.get(refusal.reason, 'the tenant had reached this limit')}"
    own = "" if refusal.own is None or not refusal.tenant else f", {refusal.own} of them of {refusal.tenant}"
    yield f"ahead: {refusal.waiting} samples waited{own}; the queue takes {refusal.capacity}"
    if refusal.due_ms is not None:
        predicted = refusal.predicted_ms
        told = "" if predicted is None else f"; its answer was predicted after {predicted:g} ms"
        yield f"deadline: it had {refusal.due_ms:g} ms left{told}"
    yield f"answer: {refusal.message}"
    if refusal.retry_ms >= 0:
        yield f"retry: the client was asked to retry after {refusal.retry_ms} ms"
    if refusal.together > 1:
        yield f"{refusal.together} requests were refused together; the numbers are of that moment"
