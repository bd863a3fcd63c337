# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
"""A runner that raises, returns and awaits what nobody should; worker processes import it by name."""

from __future__ import annotations

import asyncio

from tests.pools.runners import note

from forebay import Failure, RequestError
from forebay.workers.runner import Runner


class Own(BaseException):
    """A class of the user's that is no `Exception`."""


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Cursed(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


class NoInit(RequestError):
    def __init__(self):
        pass


class Teapot(RequestError):
    """Just a subclass, made as it should be."""


def cycle():
    loop = []
    loop.append(loop)
    return loop


RAISED = {
    "cancelled": lambda: asyncio.CancelledError("by hand"),
    "generator_exit": lambda: GeneratorExit("by hand"),
    "keyboard": lambda: KeyboardInterrupt("by hand"),
    "exit": lambda: SystemExit("by hand"),
    "own": lambda: Own("by hand"),
    "surrogate": lambda: ValueError("caf\udce9"),
    "mute": Mute,
    "cursed": Cursed,
    "huge": lambda: ValueError("x" * 10_000_000),
    "refused_surrogate": lambda: RequestError("caf\udce9"),
    "detail_surrogate": lambda: RequestError("no", detail={"name": "caf\udce9"}),
    "detail_cycle": lambda: RequestError("no", detail=cycle()),
    "detail_object": lambda: RequestError("no", detail={"it": object()}),
    "detail_huge": lambda: RequestError("no", detail=["x" * 1000] * 10_000),
    "no_init": NoInit,
    "message_none": lambda: RequestError(None),
    "teapot": lambda: Teapot("short and stout", detail={"path": "$"}),
}
FAULTS_OF_THE_CLIENT = {
    "refused_surrogate",
    "detail_surrogate",
    "detail_cycle",
    "detail_object",
    "detail_huge",
    "no_init",
    "message_none",
    "teapot",
}


def made(what):
    return RAISED[what]()


HELD = {"value_error": ValueError, "text": lambda: "text", "none": lambda: None, "no_init": NoInit, "mute": Mute}


class Rude(Runner):
    """Does what the first body says."""

    def run(self, items):
        what, *rest = items[0].body if isinstance(items[0].body, list) else ("echo",)
        if what == "raise":
            raise made(rest[0])
        if what == "one":
            return [Failure(RAISED[rest[0]]()), *["fine"] * (len(items) - 1)]
        if what == "hold":
            return [Failure(HELD[rest[0]]()), *["fine"] * (len(items) - 1)]
        if what == "stream":
            return self.stream(*rest)
        return [item.body for item in items]

    def stream(self, path, raised):
        try:
            for step in range(1000):
                yield [step]
                if raised and step == 2:
                    raise made(raised)
        finally:
            note(path, "closed")


class RudeAsync(Rude):
    async def run_async(self, items):
        what, *rest = items[0].body if isinstance(items[0].body, list) else ("echo",)
        if what == "for_ever":
            note(rest[0], "began ")
            try:
                await asyncio.Event().wait()
            finally:
                note(rest[0], "ended ")
        if what == "swallow":
            note(rest[0], "began ")
            for _ in range(2):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    note(rest[0], "swallowed ")
        if what == "cancel_itself":
            asyncio.current_task().cancel()
        await asyncio.sleep(0)
        return self.run(items)


class Unloads(Rude):
    def close(self):
        raise made("own")


class Refuses(Rude):
    def __init__(self, what):
        self.what = what

    def open(self, ctx):
        raise made(self.what)
