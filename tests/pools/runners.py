# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false
"""Runners that do what the bodies of their batch say; worker processes import this module by name."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import sys
import threading
import time
from pathlib import Path

from forebay.errors import RunnerFailed, ValidationError
from forebay.types.call import HEALTH, After, Failure
from forebay.workers.runner import Runner
from forebay.workers.user_calls.cancel import is_cancelled

PATIENCE_S = 60.0


def until(path):
    deadline = time.monotonic() + PATIENCE_S
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.005)


def note(path, text="."):
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(text)


class Told(Runner):
    """`run` looks at the first body only to know what the whole batch does."""

    def __init__(self, log=None, exits=False, hold=None):
        self.log = log
        self.hold = hold
        self.barrier = threading.Barrier(3)

    def open(self, ctx):
        self.ctx = ctx
        if self.log:
            note(self.log, "open ")
        if self.hold and Path(self.hold).exists():
            note(f"{self.hold}.{ctx.index}")
            time.sleep(60)

    def close(self):
        if self.log:
            note(self.log, "close ")

    def run(self, items):
        what, *rest = items[0].body if isinstance(items[0].body, list) else ("echo", None)
        if what == "stream":
            return self.stream(len(items), *rest)
        return getattr(self, "do_" + what)(items, *rest)

    def do_echo(self, items, *_):
        return [item.body for item in items]

    def do_sizes(self, items):
        return [[item.size, item.params.get("name")] for item in items]

    def do_pid(self, items):
        return [os.getpid()] * len(items)

    def do_thread(self, items):
        return [threading.get_ident()] * len(items)

    def do_context(self, items):
        return [[self.ctx.index, self.ctx.threads]] * len(items)

    def do_raise(self, items, text):
        raise ValueError(text)

    def do_refuse(self, items):
        raise ValidationError("not so", detail={"path": "$.x"})

    def do_exit(self, items):
        sys.exit("the user's code wants to end")

    def do_count(self, items, count):
        return ["x"] * count

    def do_none(self, items):
        return None

    def do_fail(self, items):
        return ["fine", Failure(ValidationError("bad", detail={"path": "$"})), "fine", Failure(RunnerFailed("worse"))]

    def do_odd(self, items):
        return [object()] * len(items)

    def do_odd_detail(self, items):
        return [Failure(ValidationError("bad", detail=object())), *["fine"] * (len(items) - 1)]

    def do_large(self, items, *sizes):
        return [bytes([index]) * size for index, size in enumerate(sizes)]

    def do_kill(self, items):
        os.kill(os.getpid(), signal.SIGKILL)

    def do_kill_once(self, items, path):
        if not Path(path).exists():
            note(path)
            self.do_kill(items)
        return ["survived"] * len(items)

    def do_until(self, items, started, path):
        note(started)
        until(path)
        return ["done"] * len(items)

    def do_stream_until(self, items, started, path):
        yield ["first"] * len(items)
        note(started)
        until(path)

    def do_until_named(self, items, folder):
        name = threading.current_thread().name
        note(f"{folder}/started", ".")
        until(f"{folder}/{name}")
        note(self.log, "end ")
        return [name] * len(items)

    def do_until_cancelled(self, items, started):
        note(started)
        deadline = time.monotonic() + PATIENCE_S
        while not is_cancelled():
            if time.monotonic() > deadline:
                return ["never told"] * len(items)
            time.sleep(0.002)
        note(started, "cancelled")
        return ["told"] * len(items)

    def do_end_by_cancelling(self, items, started):
        self.do_until_cancelled(items, started)
        raise asyncio.CancelledError

    def do_meet(self, items):
        return [self.barrier.wait(PATIENCE_S)] * len(items)

    def do_after(self, items, path, go):
        def work():
            until(go)
            note(path)

        return [After(item.body[0], work) for item in items]

    def do_broken_after(self, items):
        return [After("fine", lambda: 1 / 0) for _ in items]

    def do_after_exit(self, items):
        return [After("fine", sys.exit) for _ in items]

    def stream(self, count, steps, path, ends="well"):
        try:
            for step in range(steps):
                note(path)
                yield [step * 10 + index for index in range(count)]
            if ends == "raise":
                raise ValueError("in the middle")
            if ends == "short":
                yield [1] * (count + 1)
        finally:
            note(path, "closed")


class Numbers(Runner):
    """Takes a millisecond and a half for a batch, or until a file is there, and numbers the samples as they come."""

    def __init__(self):
        self.count = 0

    def run(self, items):
        time.sleep(0.0015)
        for item in items:
            if item.body.startswith("until "):
                until(item.body.removeprefix("until "))
        self.count += len(items)
        return list(range(self.count - len(items), self.count))


class ToldAsync(Told):
    """The same as coroutines, for the loop."""

    async def run_async(self, items):
        what, *rest = items[0].body if isinstance(items[0].body, list) else ("echo", None)
        if what == "until":
            note(rest[0])
            while not Path(rest[1]).exists():  # noqa: ASYNC110, ASYNC240 - the test speaks through files
                await asyncio.sleep(0.002)
            return ["done"] * len(items)
        if what == "until_cancelled":
            note(rest[0])
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if is_cancelled():
                    note(rest[0], "cancelled")
                return ["told"] * len(items)
        if what == "end_by_cancelling":
            note(rest[0])
            await asyncio.Event().wait()
        if what == "stream":
            return self.stream_async(len(items), *rest)
        await asyncio.sleep(0)
        return self.run(items)

    async def stream_async(self, *arguments):
        for step in self.stream(*arguments):
            await asyncio.sleep(0)
            yield step


class Unwilling(Told):
    """Cannot be opened, in one way or the other; or only the first `times` times."""

    def __init__(self, how="raise", log=None, times=0):
        super().__init__(log)
        if how == "init":
            raise RuntimeError("no weights")
        self.how, self.times = how, times

    def open(self, ctx):
        super().open(ctx)
        if self.log and Path(self.log).read_text(encoding="utf-8").count("open") <= self.times:
            return  # a test that removes the log lets it open again
        if self.how == "exit":
            sys.exit("no weights")
        if self.how == "kill":
            self.do_kill([])
        raise RuntimeError("no weights")


class Unwell(Told):
    """Fails each check of its health."""

    def run(self, items):
        if HEALTH in items[0].params:
            raise RunnerFailed("it is not well")
        return super().run(items)


class Keeps(Told):
    """Keeps every body, and answers with what all of them are now."""

    def __init__(self, log=None):
        super().__init__(log)
        self.kept = []

    def run(self, items):
        self.kept += [item.body for item in items]
        return [[bytes(body) for body in self.kept]] * len(items)


class Borrows(Keeps):
    """Promises to keep nothing, and tells of what type the bodies are."""

    borrows_input = True

    def run(self, items):
        return [[type(item.body).__name__, item.body[:1] == item.body[-1:]] for item in items]


class AsksLater(Told):
    """Asks in the background, also long after a batch was answered, whether it was called off."""

    def run(self, items):
        (item,) = items
        if item.body == "ask":
            context = contextvars.copy_context()
            threading.Thread(target=context.run, args=(self.ask,), daemon=True).start()
        return [item.body]

    def ask(self):
        while True:
            is_cancelled()
