# SPDX-License-Identifier: Apache-2.0
"""Whatever a model sets as the head of its answer is refused, or read by a client as exactly that."""

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.serving.models.answer_writing import write_result
from forebay.types.call import media_of
from forebay.types.model_answer import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    Answer,
    checked_headers,
    checked_status,
    error_of,
)

ODD = st.text(st.sampled_from("ab-:, \t\r\n\0ü\x7f\"'") | st.characters(), max_size=6)
HEADERS = st.lists(st.tuples(st.sampled_from(["x-a", "Set-Cookie"]) | ODD, ODD | st.none() | st.integers()), max_size=3)


@given(HEADERS)
@example([("x", "a\r\nb: c")])
@example([("x", " a")])
@example([("Content-Length", "0")])
@example([("TRANSFER-ENCODING", "chunked")])
def test_headers_are_refused_or_read_as_they_are(pairs):
    try:
        headers = checked_headers(pairs)
    except ValueError:
        return
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    client.send(h11.EndOfMessage())
    client.receive_data(f"HTTP/1.1 200 OK\r\n{lines}content-length: 2\r\n\r\nok".encode())
    head = client.next_event()
    assert isinstance(head, h11.Response)
    found = [(name.decode(), value.decode()) for name, value in head.headers.raw_items()]
    assert found == [*pairs, ("content-length", "2")]


@given(st.integers() | st.booleans() | st.none() | st.text(max_size=3) | st.floats())
def test_a_status_is_one_of_an_answer_with_a_body(status):
    allowed = type(status) is int and 200 <= status <= 599 and status not in {204, 205, 304}
    if allowed:
        assert checked_status(status) == status
    else:
        with pytest.raises(ValueError, match="expected a whole number of 200 to 599"):
            checked_status(status)


def test_headers_are_bounded():
    assert len(checked_headers([(f"x{number}", "") for number in range(MAX_HEADERS)])) == MAX_HEADERS
    for pairs in ([(f"x{number}", "") for number in range(MAX_HEADERS + 1)], [("x", "a" * MAX_HEADER_BYTES)]):
        with pytest.raises(ValueError, match="expected at most"):
            checked_headers(pairs)


def test_headers_are_a_dict():
    answer = Answer(1, headers=[("x", "a")])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="expected a dict of texts by name, got `list`"):
        write_result(answer, "json", lambda body, _: body, is_alone=True, is_raw=False)


@given(st.integers(400, 599), st.binary(max_size=8))
@example(404, b'""')
def test_a_body_becomes_the_message_of_an_error(status, body):
    error = error_of(status, body)
    assert error.message
    assert (error.code == "internal") == (status >= 500 and status not in {503, 504})
    assert media_of(body, ("", status, [])) != media_of(body, ("", 200, []))
