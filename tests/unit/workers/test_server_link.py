# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false
"""What a worker with seats sends of a round when not all of it can be sent."""

from __future__ import annotations

import msgspec

from forebay.errors import BadOutcome
from forebay.workers.pools.seats import Round
from forebay.workers.processes.child import _ServerLink
from forebay.workers.wire import frames

MOST = 200


class Connection:
    """Takes frames of so many bytes; nothing is said to it."""

    def __init__(self):
        self.sent = []

    def end(self):
        pass

    def framed(self, message):
        frame = frames.encode(message)
        if len(frame) > MOST:
            raise BadOutcome("too long")
        return frame

    def send_frame(self, frame):
        self.sent.append(msgspec.msgpack.decode(frame[frames.HEADER :]))

    def receive_all(self, *, wait):
        assert not wait
        return []


def test_a_step_of_several_is_told_in_one():
    connection = Connection()
    _ServerLink(connection, None).tell(1, Round([([1, 2], [b"a", b"b"]), (3, [b"c", b"d"])], []))
    assert connection.sent == [["round", 1, [[[1, 2], [b"a", b"b"], None], [3, [b"c", b"d"], None]], []]]


def test_one_part_of_a_step_that_cannot_be_sent_ends_its_own_stream_alone():
    connection = Connection()
    link = _ServerLink(connection, None)
    for too_much in (b"x" * MOST, object()):
        connection.sent.clear()
        link.tell(1, Round([([1, 2, 3], [b"a", too_much, b"c"])], []))
        assert connection.sent == [["round", 1, [[1, [b"a"], None], [3, [b"c"], None]], []]]
        ((kind, name, failure),) = link.receive(wait=True)
        assert (kind, name) == ("leave", 2)
        assert "a part cannot be sent to the server" in failure.error.message
