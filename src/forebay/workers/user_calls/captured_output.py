# SPDX-License-Identifier: Apache-2.0
"""What a worker process writes to its descriptors 1 and 2, past Python: libraries, programs it starts, its last words.

A thread reads both until the process has ended. It does not wait for them to be closed, because a program that the
process left behind may hold them open. It reads whatever comes, so nobody is held up; lines beyond the budget are only
counted.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from forebay.observe.logs.model_log import MAX_TEXT, Voice
from forebay.workers.processes.process_life import open_end

if TYPE_CHECKING:
    import subprocess


_READ_BYTES: Final = 1 << 16

_followers: dict[int, threading.Thread] = {}
"""Threads that read, by the process that they follow."""


def started(start: Callable[[Mapping[str, int]], subprocess.Popen[bytes]], voice: Voice) -> subprocess.Popen[bytes]:
    """Start a process whose output becomes lines of the log.

    Args:
        start: Starts it with these descriptors as its `stdout` and `stderr`.
        voice: Writes the lines.

    Raises:
        OSError: It cannot be started.
    """
    with contextlib.ExitStack() as written, contextlib.ExitStack() as undone:
        readers: dict[int, str] = {}
        writers: dict[str, int] = {}
        for name in ("stdout", "stderr"):
            reader, writer = os.pipe()
            undone.callback(os.close, reader)
            written.callback(os.close, writer)
            os.set_blocking(reader, False)
            readers[reader] = name
            writers[name] = writer
        process = start(writers)
        try:
            ended = open_end(process.pid, process.wait)
        except BaseException:
            process.kill()
            process.wait()
            raise
        undone.pop_all()

    def follow() -> None:
        _follow(readers, ended, voice)
        _followers.pop(process.pid, None)

    follower = threading.Thread(target=follow, name="forebay-output", daemon=True)
    _followers[process.pid] = follower
    follower.start()
    return process


def join(pid: int, timeout_s: float) -> None:
    """Wait until the last words of a process that has ended are in the log, if it is one that is followed."""
    follower = _followers.get(pid)
    if follower is not None:
        follower.join(timeout_s)


def _follow(readers: dict[int, str], ended: int, voice: Voice) -> None:
    polled = select.poll()
    for descriptor in (*readers, ended):
        polled.register(descriptor, select.POLLIN)
    pending = dict.fromkeys(readers, b"")
    try:
        while pending:
            ready = [descriptor for descriptor, _ in polled.poll()]
            for descriptor in list(pending):
                # What it wrote before its end is there once the end is known: then it is read as far as it goes.
                while descriptor in ready or ended in ready:
                    try:
                        data = os.read(descriptor, _READ_BYTES)
                    except BlockingIOError:
                        break
                    if not data:
                        polled.unregister(descriptor)
                        _say(voice, readers[descriptor], pending.pop(descriptor) + b"\n")
                        break
                    *whole, rest = (pending[descriptor] + data).rpartition(b"\n")
                    if len(rest) > MAX_TEXT:
                        whole, rest = [rest, b"\n"], b""
                    pending[descriptor] = rest
                    if whole[-1]:
                        _say(voice, readers[descriptor], b"".join(whole))
                    if ended not in ready:
                        break
            if ended in ready:
                for descriptor, rest in pending.items():
                    _say(voice, readers[descriptor], rest + b"\n")
                return
    finally:
        for descriptor in (*readers, ended):
            os.close(descriptor)


def _say(voice: Voice, stream: str, lines: bytes) -> None:
    if lines != b"\n":
        voice.say_raw(stream, lines)
