# SPDX-License-Identifier: Apache-2.0
"""The fuzzers of `make fuzz`, each for a few seconds; and that they would find what was found once."""

import pytest
from tests.fuzz import run

from forebay.transports.http.connection_state import ConnectionState
from forebay.transports.http.reading import ReadingConnection
from forebay.transports.http.same_turn import Mailbox

SECONDS = 1.5
"""They begin the same way as in `make fuzz`, which goes on."""
TIMED = {"door_crowds"}
"""Those that measure how long an answer takes, which tests must not; `test_crowds.py` has their attacks."""

LOADING = {"door_model_files"}
"""Those whose libraries take longer to be loaded; `test_model_files.py` damages files as well."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in run.doors() if name not in TIMED | LOADING])
def test_a_door_does_what_other_implementations_do(name):
    assert run.run([name], SECONDS, seed=11) == 0


@pytest.mark.slow
def test_the_fuzzer_finds_a_head_that_is_learned_from_another_request(monkeypatch, capsys):  # F1
    from tests.fuzz import door_http

    def learn(self, data, raw):
        head = self._reading
        if head is not None and head.is_usual and head.problem is None and raw.startswith(b"POST "):
            self._lane.remember(raw, head, self.headers, self.url)

    monkeypatch.setattr(ConnectionState, "may_be_remembered", True)
    monkeypatch.setattr(
        ReadingConnection, "_learn", learn
    )  # neither what the state says nor what is compared with the segment
    found = 0
    for seed in range(1, 50):  # a lane takes a moment, and every third one finds it
        found = door_http.fuzz([seed * door_http.LANES_A_SEED], float("inf"))[1]
        if found:
            break
    assert found
    assert "answered on a warm lane" in capsys.readouterr().out


def _swapped(arrived):
    return [arrived[1].arrived, arrived[0].arrived, *(each.arrived for each in arrived[2:])]


def _moved_up(arrived):
    """Whoever comes after one that has left gets the place before."""
    left = [each.arrived for each in arrived if not each.transport.is_closing()]
    return [*left, *(each.arrived for each in arrived[len(left) :])]


@pytest.mark.slow
@pytest.mark.parametrize("wrongly", [_swapped, _moved_up])
def test_the_fuzzer_finds_requests_of_one_turn_that_are_taken_for_those_of_others(wrongly, monkeypatch, capsys):
    from tests.fuzz import door_http

    submit = Mailbox._submit

    def mistake(self, arrived, *more):
        if len(arrived) > 1:
            for connection, data in zip(arrived, wrongly(arrived), strict=True):
                connection.arrived = data
        submit(self, arrived, *more)

    monkeypatch.setattr(Mailbox, "_submit", mistake)
    lanes = range(door_http.LANES_A_SEED, door_http.LANES_A_SEED + 50)
    assert any(door_http.fuzz([lane], float("inf"))[1] for lane in lanes)  # a lane takes a tenth of a second
    assert "in the same turns sent" in capsys.readouterr().out


@pytest.mark.slow
def test_the_fuzzer_finds_a_header_block_that_has_come_to_mean_something_else(monkeypatch, capsys):
    from tests.fuzz import door_grpc

    from forebay.transports.grpc.hpack import Decoder

    monkeypatch.setattr(Decoder, "changes", property(lambda _: 0, lambda _, value: None), raising=False)
    assert door_grpc.main(30.0, seed=5, enough=1) > 0
    assert "another answer on stream" in capsys.readouterr().out
