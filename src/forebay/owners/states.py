# SPDX-License-Identifier: Apache-2.0
"""The states of a link between a front and an owner, in one table for each side: what may be said, and what follows.

`CALLERS` is the owner's side, and has what a caller may say. `OWNERS` is the front's side, and has what an owner may
say. `SEATS` is where a handed-on request is, as the owner sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forebay.transports.state_table import Event, State

# ---------------------------------------------------------------------------------------------------------------------
# The owner's side of a link

GREETING: Final = State("greeting")
SERVING: Final = State("serving")
LEAVING: Final = State("leaving")
GONE: Final = State("gone")

HELLO: Final = Event("the caller says who it is; the door has checked the secret")
SEES: Final = Event("the caller sees the owner's files in memory")
REQUESTS: Final = Event("a bundle: requests, and what is said about those before")
SERVINGS: Final = Event("a member says which servings it runs")
BEAT: Final = Event("the other side can still be reached")
DRAIN: Final = Event("the owner takes no further requests")
HANG_UP: Final = Event("either side hangs up, or the caller has violated the protocol")

CALLERS: Final[Mapping[State, Mapping[Event, State]]] = {
    GREETING: {HELLO: SERVING, HANG_UP: GONE},
    SERVING: {SEES: SERVING, REQUESTS: SERVING, SERVINGS: SERVING, BEAT: SERVING, DRAIN: LEAVING, HANG_UP: GONE},
    # requests that come now are handed back
    LEAVING: {SEES: LEAVING, REQUESTS: LEAVING, SERVINGS: LEAVING, BEAT: LEAVING, DRAIN: LEAVING, HANG_UP: GONE},
    GONE: {HANG_UP: GONE},
}

# ---------------------------------------------------------------------------------------------------------------------
# The front's side of a link

ASKING: Final = State("asking")
TRUSTING: Final = State("trusting")
PROVING: Final = State("proving")
PROVEN: Final = State("proven")
OPEN: Final = State("open")
ENDING: Final = State("ending")
LOST: Final = State("lost")

CHALLENGE: Final = Event("the owner asks for a proof")
WELCOME: Final = Event("the owner proves that it knows the secret")
OPENING: Final = Event("the owner lets the front in")
MODELS: Final = Event("the owner describes what it serves")
DIRECTORY: Final = Event("a server tells a member what runs where")
ANSWERS: Final = Event("a bundle of answers, and the room that is left")
LEAVE: Final = Event("the owner takes no further requests")
REFUSAL: Final = Event("the owner does not let the front in")
LOSE: Final = Event("either side hangs up, or the owner has violated the protocol")

OWNERS: Final[Mapping[State, Mapping[Event, State]]] = {
    # the front has a secret: an owner that asks for none is not the right one
    ASKING: {CHALLENGE: PROVING, REFUSAL: LOST, LOSE: LOST},
    # it has none
    TRUSTING: {OPENING: OPEN, REFUSAL: LOST, LOSE: LOST},
    PROVING: {WELCOME: PROVEN, REFUSAL: LOST, LOSE: LOST},
    PROVEN: {OPENING: OPEN, REFUSAL: LOST, LOSE: LOST},
    OPEN: {MODELS: OPEN, DIRECTORY: OPEN, ANSWERS: OPEN, BEAT: OPEN, LEAVE: ENDING, LOSE: LOST},
    # what was handed on is still answered
    ENDING: {MODELS: ENDING, DIRECTORY: ENDING, ANSWERS: ENDING, BEAT: ENDING, LOSE: LOST},
    LOST: {LOSE: LOST},
}

# ---------------------------------------------------------------------------------------------------------------------
# A seat: a request that was handed on

RUNNING: Final = State("running")
STREAMING: Final = State("streaming")
CALLED_OFF: Final = State("cancelled")
OVER: Final = State("over")

PARTS: Final = Event("parts of its answer leave")
CALL_OFF: Final = Event("the front does not wait for it any more, or is gone")
END: Final = Event("its outcome is known")

SEATS: Final[Mapping[State, Mapping[Event, State]]] = {
    RUNNING: {PARTS: STREAMING, CALL_OFF: CALLED_OFF, END: OVER},
    STREAMING: {PARTS: STREAMING, CALL_OFF: CALLED_OFF, END: OVER},
    # no parts leave any more
    CALLED_OFF: {END: OVER},
    OVER: {},
}
