# SPDX-License-Identifier: Apache-2.0
"""Where a gRPC connection is, and where one of its calls is: a table for each. No I/O.

    connection   calls begin   what arrives is   and so
    OPEN         yes           read
    WARNED       yes           read              its client was told that the server stops, but may not know it yet
    LEAVING      no            read              closes once its calls are answered
    LINGER       no            dropped           everything is written; closes once its client is quiet
    GONE         no            dropped           closed, by whichever side

A call has two ends that close by themselves: its client's when everything is sent, its method's when the status is
decided. What was sent before the status may still be on its way then.

    call         the client may send   the status is
    RECEIVING    yes                   open
    HALF_CLOSED  no                    open
    EARLY        yes                   decided; what the client still sends is dropped
    DECIDED      no                    decided
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from forebay.transports.state_table import Event, State


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class GrpcState(State):
    """Where a connection is."""

    begins: bool
    reads: bool


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class CallState(State):
    """Where a call is."""

    is_half_closed: bool
    is_done: bool


WARN: Final = Event("the server announces that it stops")
LEAVE: Final = Event("no more calls begin")
HANG_UP: Final = Event("everything is written")
LOSE: Final = Event("the connection is closed")

OPEN: Final = GrpcState("OPEN", begins=True, reads=True)
WARNED: Final = GrpcState("WARNED", begins=True, reads=True)
LEAVING: Final = GrpcState("LEAVING", begins=False, reads=True)
LINGER: Final = GrpcState("LINGER", begins=False, reads=False)
GONE: Final = GrpcState("GONE", begins=False, reads=False)

CONNECTIONS: Final[Mapping[GrpcState, Mapping[Event, GrpcState]]] = {
    OPEN: {WARN: WARNED, LEAVE: LEAVING, HANG_UP: LINGER, LOSE: GONE},
    WARNED: {LEAVE: LEAVING, HANG_UP: LINGER, LOSE: GONE},
    LEAVING: {HANG_UP: LINGER, LOSE: GONE},
    LINGER: {LOSE: GONE},
    GONE: {LOSE: GONE},
}

END_STREAM: Final = Event("the client has sent everything")
DECIDE: Final = Event("the status is decided")

RECEIVING: Final = CallState("RECEIVING", is_half_closed=False, is_done=False)
HALF_CLOSED: Final = CallState("HALF_CLOSED", is_half_closed=True, is_done=False)
EARLY: Final = CallState("EARLY", is_half_closed=False, is_done=True)
DECIDED: Final = CallState("DECIDED", is_half_closed=True, is_done=True)

CALLS: Final[Mapping[CallState, Mapping[Event, CallState]]] = {
    RECEIVING: {END_STREAM: HALF_CLOSED, DECIDE: EARLY},
    HALF_CLOSED: {DECIDE: DECIDED},
    EARLY: {END_STREAM: DECIDED},
    DECIDED: {},
}
