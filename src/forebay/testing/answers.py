# SPDX-License-Identifier: Apache-2.0
"""What a client under test gets back: an answer as it was sent, or the error it stands for."""

from __future__ import annotations

from typing import Any

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP answer.

    Attributes:
        status: Its code.
        headers: By name, in lower case.
        body: As it was sent.
        trace: The traceback of the model, where it is to blame: what only the server's log tells otherwise.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    trace: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether it is not an error."""
        return self.status < 400

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()

    def json(self) -> Any:
        """Read the body as JSON."""
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """What an error says: `code`, `message`, `request_id`, and `detail` if there is more to tell."""
        return self.json()["error"]

    @property
    def value(self) -> Any:
        """The result: read if it is JSON, a list if it was streamed, else the bytes.

        Raises:
            CallFailed: If it is an error, or a stream that ended with one.
        """
        if not self.is_ok:
            raise CallFailed(self, self.error)
        media = self.headers.get("content-type", "")
        if media.startswith("text/event-stream"):
            return [self.part(event) for event in self.body.split(b"\n\n") if event]
        if media == "application/msgpack":
            return msgspec.msgpack.decode(self.body)
        return self.json() if media == "application/json" else self.body

    def part(self, event: bytes) -> Any:
        """Read one event of a stream.

        Raises:
            CallFailed: If it tells of an error.
        """
        kind, _, data = event.rpartition(b"data: ")
        found = msgspec.json.decode(data)
        if kind:
            raise CallFailed(self, found["error"])
        return found


class CallFailed(Exception):
    """The server answered with an error.

    Attributes:
        answer: As it was sent.
        status: 200 for a stream that had begun.
        code: The kind of error, such as `invalid_argument`.
        message: What the client is told.
        detail: More of it, such as the `path` of the field; None if there is no more.
    """

    def __init__(self, answer: Answer, error: dict[str, Any]) -> None:
        self.answer = answer
        self.status: int = answer.status
        self.code: str = error["code"]
        self.message: str = error["message"]
        self.detail: Any = error.get("detail")
        super().__init__(f"{answer.status} {self.code}: {self.message}")
        if answer.trace:
            self.add_note(answer.trace.rstrip())
