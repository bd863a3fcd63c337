# SPDX-License-Identifier: Apache-2.0
"""What a host and a node process say to each other over the socket in the node's folder.

Both sides prove that they know the deployment's secret, as workers and servers do. Then the client asks one question
and gets one answer, and the connection ends.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from forebay.cluster.deployment import MAX_STATE_BYTES
from forebay.errors import ForebayError, InvalidRequest, Unavailable
from forebay.types.first_use import known
from forebay.workers.wire.address import UnixAddress, bind_unix, dial
from forebay.workers.wire.shared_secret import NONCE_BYTES, is_proof, nonce, proof

MAX_BYTES: Final = MAX_STATE_BYTES + (1 << 16)
_SERVER: Final = "node"
_CLIENT: Final = "host"
_LENGTH: Final = struct.Struct(">I")
_PROOF_BYTES: Final = 32
PATIENCE_S: Final = 5.0
"""How long either side waits for the other one."""


class ControlQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What a node process is asked.

    Attributes:
        verb: What it is to do.
        data: What it needs for that.
    """

    verb: str
    data: bytes = b""


class ControlAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What it answers.

    Attributes:
        problem: Why it could not; empty if it did.
        result: What came of it.
    """

    problem: str = ""
    result: Any = None


def ask(path: Path, secret: bytes, verb: str, data: bytes = b"", patience_s: float = PATIENCE_S) -> Any:
    """Ask the node process of a folder; returns the result.

    Raises:
        Unavailable: It does not answer, or does not know the secret.
        InvalidRequest: It refuses.
    """
    try:
        with dial(UnixAddress(str(path)), patience_s) as connection:
            connection.settimeout(patience_s)
            theirs, ours = _received(connection, NONCE_BYTES), nonce()
            connection.sendall(proof(secret, _CLIENT, theirs, ours) + ours)
            if not is_proof(_received(connection, _PROOF_BYTES), secret, _SERVER, theirs, ours):
                raise Unavailable(f"what listens at {path} does not know the secret of its folder")
            _send(connection, msgspec.msgpack.encode(ControlQuestion(verb=verb, data=data)))
            answer = msgspec.msgpack.decode(_framed(connection), type=known(ControlAnswer))
    except (OSError, EOFError, msgspec.DecodeError) as error:
        why = getattr(error, "strerror", None) or str(error) or "it hung up"
        raise Unavailable(f"the node process at {path} does not answer: {why}") from error
    if answer.problem:
        raise InvalidRequest(answer.problem)
    return answer.result


class ControlSocket:
    """Answers the questions of hosts, one at a time."""

    def __init__(self, path: Path, secret: bytes, answer: Callable[[ControlQuestion], Any]) -> None:
        """Listen.

        Args:
            secret: What clients must know.
            answer: Returns the result of a question; a `ForebayError` is told to the client.

        Raises:
            ConfigError: Another process listens there, or the path cannot be used.
        """
        self._secret = secret
        self._answer = answer
        self._socket = bind_unix(UnixAddress(str(path)))
        self._socket.setblocking(True)
        self._socket.listen(16)
        threading.Thread(target=self._serve, name="forebay-control", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # the thread that accepts is waiting
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                continue
            with connection, contextlib.suppress(OSError, EOFError, msgspec.DecodeError):
                self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        ours = nonce()
        connection.sendall(ours)
        said = _received(connection, _PROOF_BYTES + NONCE_BYTES)
        theirs = said[_PROOF_BYTES:]
        if not is_proof(said[:_PROOF_BYTES], self._secret, _CLIENT, ours, theirs):
            return
        connection.sendall(proof(self._secret, _SERVER, ours, theirs))
        question = msgspec.msgpack.decode(_framed(connection), type=known(ControlQuestion))
        try:
            answer = ControlAnswer(result=self._answer(question))
        except ForebayError as error:
            answer = ControlAnswer(problem=error.message)
        except OSError as error:
            answer = ControlAnswer(problem=f"{error.filename or 'a file'}: {error.strerror}")
        _send(connection, msgspec.msgpack.encode(answer))


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _framed(connection: socket.socket) -> bytes:
    """Return a frame; raises an `EOFError` if the other side hangs up, or wants to send more than is read."""
    (size,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
    if size > MAX_BYTES:
        raise EOFError(f"a frame of {size} bytes came, and at most {MAX_BYTES} are read")
    return _received(connection, size)


def _received(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        some = connection.recv(min(size - len(data), 1 << 16))
        if not some:
            raise EOFError
        data += some
    return bytes(data)
