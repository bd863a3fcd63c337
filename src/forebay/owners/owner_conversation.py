# SPDX-License-Identifier: Apache-2.0
"""The front's side of a link with an owner: the handshake, and what is heard. Sans-I/O.

Bytes go in, messages come out, and so do frames to send. `owner_link.py` drives it. A front that has a secret talks to
no owner that does not prove it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ConfigError, InvalidRequest
from forebay.owners import states
from forebay.owners.detached_bodies import MAX_SEATS, BodiesTaker, LinkReader
from forebay.owners.states import LOSE, OWNERS
from forebay.owners.wire import (
    FromOwner,
    LinkBeat,
    OwnedModels,
    OwnerAnswers,
    OwnerChallenge,
    OwnerDirectory,
    OwnerLeaving,
    OwnerOpening,
    OwnerRefusal,
    OwnerWelcome,
    bodies_of,
)
from forebay.types.first_use import known
from forebay.workers.wire import frames, shared_secret

if TYPE_CHECKING:
    from forebay.transports.state_table import Event, State

MAX_ELEMENTS: Final = 16_000_000
"""The most values in one result, or in what an owner says of a model."""

_MESSAGES: Final = known(FromOwner)
_EVENTS: Final[Mapping[type, Event]] = {
    OwnerChallenge: states.CHALLENGE,
    OwnerWelcome: states.WELCOME,
    OwnerRefusal: states.REFUSAL,
    OwnerOpening: states.OPENING,
    OwnedModels: states.MODELS,
    OwnerDirectory: states.DIRECTORY,
    OwnerAnswers: states.ANSWERS,
    OwnerLeaving: states.LEAVE,
    LinkBeat: states.BEAT,
}


class OwnerConversation:
    """What an owner has said, and what it may say next.

    Attributes:
        state: Where the link is in `OWNERS`.
        problem: Why the link is of no use; empty while it is.
        max_body_bytes: Longest body that the owner reads.
    """

    def __init__(
        self,
        name: str,
        secret: bytes | None,
        write: Callable[[bytes], object],
        listener: BodiesTaker | None = None,
        role: str = frames.CALLER,
    ) -> None:
        """Describe it; `greet` begins.

        Args:
            name: What the front calls itself, and nobody else.
            listener: Hears of results before they come.
            role: `frames.CALLER`, or `frames.MEMBER` or `frames.PEER` to be told a directory.
        """
        self._role = role
        self._us = "this program" if role == frames.MEMBER else "this server"
        self.state: State = states.TRUSTING if secret is None else states.ASKING
        self.problem = ""
        self.max_body_bytes = 0
        self._name = name
        self._secret = secret
        self._write = write
        self._nonce = shared_secret.nonce()
        self._theirs = b""
        self._reader = LinkReader(_MESSAGES, bodies_of, max_elements=MAX_ELEMENTS)
        self._reader.listener = listener

    def greet(self, shown: tuple[str, int] | None = None) -> None:
        """Say hello, and which file in memory the owner may open to find out whether it sees such files."""
        about: dict[str, Any] = {"role": self._role, "worker": self._name, "shares": shown}
        if self._secret is not None:
            about["nonce"] = self._nonce
        self._write(frames.encode(["hello", frames.VERSION, about]))

    def feed(
        self, data: bytes | bytearray | memoryview
    ) -> Iterator[OwnedModels | OwnerDirectory | OwnerAnswers | OwnerLeaving | OwnerOpening]:
        """Read bytes and yield what the owner says once it has let the front in; see `problem` at the end."""
        if self.problem:
            return
        try:
            for message in self._reader.feed(data):
                event = _EVENTS[type(message)]
                if event not in OWNERS[self.state]:
                    raise InvalidRequest(f"'{event.meaning}' is not part of the protocol while it is {self.state}")
                self.state = OWNERS[self.state][event]
                match message:
                    case OwnerAnswers():
                        yield self._checked(message)
                    case OwnerChallenge(nonce):
                        self._prove(nonce)
                    case OwnerWelcome(proof):
                        self._check(proof)
                    case LinkBeat():
                        pass  # that it came is all it says
                    case OwnerRefusal(reason):
                        self.problem = f"it refuses {self._us}: {reason}"
                        return
                    case OwnerOpening(options):
                        self.max_body_bytes = int(options.get("max_body", frames.MAX_FRAME_BYTES))
                        yield message
                    case _:
                        yield message
        except ConfigError as error:
            self._give_up(error.message)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a message, its sender is at fault
            if self.state in (states.ASKING, states.TRUSTING):
                self._give_up(
                    f"it does not ask for the secret that {self._us} has, or is not an owner"
                    if self.state is states.ASKING
                    else f"it is not an owner: {error}"
                )
            else:
                self._give_up(f"it does not speak the protocol: {error}")

    def lose(self) -> None:
        """Read nothing more."""
        self.state = OWNERS[self.state][LOSE]

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self.lose()

    def _prove(self, nonce: bytes) -> None:
        assert self._secret is not None
        self._theirs = nonce
        self._write(frames.encode(["proof", shared_secret.proof(self._secret, "worker", nonce, self._nonce)]))

    def _check(self, proof: bytes) -> None:
        assert self._secret is not None
        if not shared_secret.is_proof(proof, self._secret, "server", self._theirs, self._nonce):
            raise ConfigError("its secret is not this server's; give both the same one: --attach-secret @FILE")

    def _checked(self, message: OwnerAnswers) -> OwnerAnswers:
        count, returns = 0, False
        for told in message.models:
            count += len(told.ended)
            for _, parts in told.parts:
                count += parts
            returns = returns or bool(told.returned)
        if count != len(message.results):
            raise InvalidRequest(f"it announces {count} results and gives {len(message.results)}")
        if count + len(message.models) > MAX_SEATS:
            raise InvalidRequest(f"an answer has more than {MAX_SEATS} results and models")
        if returns and states.LEAVE in OWNERS[self.state]:
            raise InvalidRequest("it returns requests, and has not announced that it leaves")
        return message
