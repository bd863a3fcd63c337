# SPDX-License-Identifier: Apache-2.0
"""The states of a conversation with a worker, in one table: what may be said or done, and where that leads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

State: TypeAlias = Literal["greeting", "opening", "idle", "busy", "finishing", "seated", "gone"]


class Act:
    """What changes a state and is not a message of the worker; compared by identity."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        """Print what it is."""
        return self.what


BEGIN: Final = Act("the server sends a batch")
UNREADY: Final = Act("a result that does not ask for the next batch")
CLOSE: Final = Act("either side hangs up, or the worker has violated the protocol")

_ANY: Final[Mapping[str | Act, State]] = {CLOSE: "gone"}


def _open(state: State) -> Mapping[str | Act, State]:
    """Return what may come at any time after the hello."""
    return {**_ANY, "leaving": state, "log": state, "metrics": state}


TABLE: Final[Mapping[State, Mapping[str | Act, State]]] = {
    # the worker has connected
    "greeting": {**_ANY, "hello": "opening"},
    # it was told what to run, or is about to be told, and loads it
    "opening": {**_open("opening"), "ready": "idle", "sit": "seated", "failed": "gone"},
    # it waits for a batch
    "idle": {**_open("idle"), BEGIN: "busy"},
    # it runs a batch; a round has parts of its answers
    "busy": {**_open("busy"), "round": "busy", "keeps": "busy", "result": "idle", UNREADY: "finishing"},
    # the batch is answered, and it does what follows the answers
    "finishing": {**_open("finishing"), "ready": "idle"},
    # it has seats, where any number of batches stream side by side; `go` says which join and which leave
    "seated": {**_open("seated"), "round": "seated"},
    # the connection is closed, or will be: nothing is read any more
    "gone": _ANY,
}
"""What a worker may say in each state, what else may happen there, and which state follows."""
