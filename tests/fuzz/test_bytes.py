# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes a client sends, the server answers with HTTP or hangs up, and goes on serving others.

What was found once stays as an `@example`.
"""

import re
import socket

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

TARGET = b"/models/weigh"
GOOD = b'{"name":"a","leaves":[{"weight":1}]}'
QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)

tokens = st.sampled_from(
    [
        *(b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"CONNECT", b"PRI", b"M-SEARCH"),
        *(b" ", b"\t", b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\0", b":", b": ", b",", b";", b"/", b"%", b"?", b"#"),
        *(b" HTTP/1.1", b" HTTP/1.0", b" HTTP/0.9", b" HTTP/2.0"),
        *(
            TARGET,
            b"/models/%77eigh",
            b"/healthz",
            b"/metrics",
            b"*",
            b"http://a/models/weigh",
            b"//",
            b"/%ff",
            b"/\xff",
        ),
        *(b"host: a", b"content-length", b"content-length: 37", b"content-length: 0", b"content-length: -1"),
        *(b"content-length: 18446744073709551616", b"transfer-encoding: chunked", b"transfer-encoding: gzip"),
        *(
            b"expect: 100-continue",
            b"connection: close",
            b"connection: upgrade",
            b"upgrade: h2c",
            b"connection: keep-alive",
        ),
        *(b"content-type: application/json", b"content-type: application/msgpack", b"content-type: \xff"),
        *(b"accept: ;q=", b"accept: */*;q=nan", b"x-request-timeout-ms: 1", b"x-request-timeout-ms: \xb2"),
        *(b"x-request-id: a", b"x-request-id: \xe9", b"authorization: Bearer \xff", b"origin: null"),
        *(
            b"0\r\n\r\n",
            b"5\r\n",
            b"ffffffffffffffff\r\n",
            b"0\r\nx: y\r\n\r\n",
            GOOD,
            b"{",
            b"[" * 2000,
            b"\x91" * 2000,
        ),
    ]
)
messages = st.lists(st.one_of(tokens, tokens, st.binary(max_size=20)), max_size=25).map(b"".join)
headers = st.lists(
    st.sampled_from(
        [
            b"content-type: application/json",
            b"accept: */*",
            b"expect: 100-continue",
            b"connection: close",
            b"transfer-encoding: chunked",
            b"content-length: 37",
            b"content-length: 3",
            b"x-request-timeout-ms: 5000",
            b"x-request-id: \xff",
            b"upgrade: websocket",
            b"connection: upgrade",
            b"accept: x/y",
            b"content-type: \xb2",
        ]
    ),
    max_size=5,
)


@pytest.fixture(scope="module")
def server(launch):
    return launch("fuzzed.py", "--worker-kind", "thread", "--max-body-bytes", "100000")


@pytest.fixture(scope="module")
def zoo(launch):
    return launch("zoo.py", "--worker-kind", "thread", "--max-body-bytes", "200000")


def exchange(server, data, cuts=()):
    """Sends bytes in pieces, ends, and returns all that came back."""
    with server.connect() as wire:
        wire.socket.settimeout(20)  # neither answering nor hanging up is a failure; after 30 the server would hang up
        try:
            wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                wire.send(data[start:end])
            wire.socket.shutdown(socket.SHUT_WR)
            return wire.read_rest()
        except TimeoutError:
            raise
        except OSError:
            return b""  # it hung up while we were still talking


def check(server, came_back):
    """Only HTTP came back, nothing in it is the server's fault, and the next client is served."""
    statuses = re.findall(rb"(?:^|[\r\n}\]\"\d])HTTP/1\.1 (\d\d\d)[^\r\n]*\r\n", came_back)
    assert not came_back or came_back.startswith(b"HTTP/1.1 "), came_back[:100]
    assert not [status for status in statuses if status >= b"500" and status not in {b"503", b"504"}], came_back[:500]
    with server.connect() as wire:
        answer = wire.ask("POST", TARGET.decode(), GOOD)
        assert (answer.status, answer.body) == (200, b'{"name":"a","total":1.0}')
    assert "Traceback" not in server.log, server.log[-2000:]


@QUICK
@given(data=st.one_of(messages, messages, st.binary(max_size=200)))
@example(data=b"")
@example(data=b"\r\n\r\n")
@example(data=b"GET")
@example(data=b"POST /models/weigh HTTP/1.1\r\ncontent-length: 5\r\n\r\n")
@example(data=b"POST /models/weigh HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 37\r\n\r\n")
@example(data=b"POST /models/weigh HTTP/1.1\r\ncontent-length: " + b"9" * 400 + b"\r\n\r\n")
@example(data=b"POST /models/weigh HTTP/1.1\r\nx-request-timeout-ms: \xb2\r\ncontent-length: 0\r\n\r\n")
@example(data=b"GET //[ HTTP/1.1\r\nhost: a\r\n\r\n")
@example(data=b"GET http://[ HTTP/1.1\r\nhost: a\r\n\r\n")
@example(data=b"GET /%ff%00 HTTP/1.1\r\nhost: \xff\r\n\r\n")
@example(data=b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n" + b"x" * 100)
@example(data=b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n")
def test_no_bytes_stop_the_server(server, data):
    check(server, exchange(server, data))


@QUICK
@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from([b"POST", b"POST", b"GET", b"HEAD", b"PUT"]),
            st.sampled_from([TARGET, TARGET, b"/", b"/models/%77eigh", b"/healthz", b"/nowhere"]),
            headers,
            st.sampled_from([GOOD, b"", b"{", b"25\r\n" + GOOD + b"\r\n0\r\n\r\n", b"xyz\r\n"]),
        ),
        min_size=1,
        max_size=6,
    ),
    cuts=st.lists(st.integers(0, 1500), max_size=4).map(sorted),
)
@example(asked=[(b"POST", TARGET, [b"transfer-encoding: chunked", b"content-length: 3"], b"0\r\n\r\n")] * 2, cuts=[])
@example(asked=[(b"POST", TARGET, [], GOOD)] * 6, cuts=[1, 60, 61, 200])
@example(asked=[(b"POST", TARGET, [b"connection: upgrade", b"upgrade: websocket"], GOOD)] * 2, cuts=[])
def test_no_sequence_of_requests_stops_the_server(server, asked, cuts):
    data = b""
    for method, target, named, body in asked:
        given_length = any(b"length" in name or b"chunked" in name for name in named)
        length = [] if given_length else [b"content-length: %d" % len(body)]
        data += b"\r\n".join([method + b" " + target + b" HTTP/1.1", b"host: a", *named, *length, b"", body])
    check(server, exchange(server, data, [cut for cut in cuts if cut < len(data)]))


@QUICK
@given(body=st.one_of(st.binary(max_size=200), st.lists(tokens, max_size=5).map(b"".join)), packed=st.booleans())
@example(body=b"[" * 50_000, packed=False)
@example(body=b"\x91" * 50_000, packed=True)
@example(body=b'{"name":"a","leaves":' * 3000, packed=False)
@example(body=b'{"name":"\\ud800","leaves":[]}', packed=False)
@example(body=b'{"name":"a","leaves":[],"depth":' + b"9" * 5000 + b"}", packed=False)
@example(body=b'{"name":"a","leaves":[{"weight":1e999}]}', packed=False)
@example(body=b"\xdd\xff\xff\xff\xff", packed=True)
@example(body=b"\xc7\x0c\xff" + b"\xff" * 12, packed=True)
@example(body=b"\x83\xa4name\xa1a\xa6leaves\x90\xa5depth\xcf" + b"\xff" * 8, packed=True)
@pytest.mark.parametrize("model", ["weigh", "echo", "pydantic", "doubles", "count"])
def test_no_body_is_the_servers_fault(server, zoo, model, body, packed):
    kind = "application/msgpack" if packed else "application/json"
    with (server if model == "weigh" else zoo).connect() as wire:
        for _ in range(2):
            answer = wire.ask("POST", f"/models/{model}", body, headers=[f"content-type: {kind}"])
            assert answer.status in {200, 400, 422}
            assert answer.status == 200 or "error" in answer.json()
