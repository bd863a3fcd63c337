# SPDX-License-Identifier: Apache-2.0
"""A server of S3 that holds any key at all, and says what a test tells it to say."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000


def listed(keys, sizes=None, etags=None, more=""):
    """A page of a listing with these keys."""
    found = [
        f"<Contents><Key>{_text(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{_text((etags or {}).get(key, chr(34) + 'x' + chr(34)))}</ETag>"
        f"<Size>{(sizes or {}).get(key, 1)}</Size></Contents>"
        for key in keys
    ]
    return f"<ListBucketResult>{''.join(found)}{more}</ListBucketResult>".encode()


class HostileStore:
    """Objects by their keys, of one bucket of any name; nobody has to sign.

    `answer(path, query)` returns what is to be answered instead: status, headers and an iterable of bytes.
    """

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.answer: Any = lambda _path, _query: None
        self.seen: list[str] = []
        self.end = threading.Event()
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_arguments: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
                pass

            def do_GET(self):
                store.seen.append(self.path)
                told = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(told.query, keep_blank_values=True).items()}
                path = unquote(told.path).lstrip("/").partition("/")[2]
                try:
                    status, headers, parts = store.answer(path, query) or store.usual(path, query, self.headers)
                    self.close_connection = "content-length" not in headers
                    self.send_response_only(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    for part in parts if self.command == "GET" else ():
                        if store.end.is_set():
                            break
                        self.wfile.write(part)
                except OSError:  # nobody reads it any more
                    self.close_connection = True

            do_HEAD = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def environment(self):
        return {
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        }

    def close(self):
        self.end.set()
        self.server.shutdown()
        self.server.server_close()

    def usual(self, path, query, headers):
        """What S3 answers."""
        if "list-type" in query:
            return whole(200, self._page(query))
        if path not in self.objects:
            return whole(404, b"<Error><Code>NoSuchKey</Code><Message>The key is not here</Message></Error>")
        data = self.objects[path]
        told = {"etag": self.etags.get(path, '"x"'), "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if (asked := headers.get("range")) is None:
            return whole(200, data, **told)
        start, end = map(int, asked.removeprefix("bytes=").split("-"))
        part = data[start : end + 1]
        return whole(206, part, **{**told, "content-range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"})

    def _page(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        keys, prefixes = [], []
        for key in sorted(key for key in self.objects if key.startswith(prefix) and key > after):
            if delimiter and delimiter in key[len(prefix) :]:
                prefixes.append(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
            else:
                keys.append(key)
        more = f"<NextContinuationToken>{_text(keys[PAGE - 1])}</NextContinuationToken>" if len(keys) > PAGE else ""
        more += "".join(f"<CommonPrefixes><Prefix>{_text(one)}</Prefix></CommonPrefixes>" for one in {*prefixes})
        return listed(keys[:PAGE], {key: len(data) for key, data in self.objects.items()}, self.etags, more)


def whole(status, body, **headers):
    return status, {**headers, "content-length": str(len(body))}, [body]


def endless(part, pause_s=0.0):
    """A body that never ends."""
    while True:
        yield part
        time.sleep(pause_s)


def _text(text):
    return "".join(letter if letter.isprintable() else f"&#{ord(letter)};" for letter in escape(text))
