# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportOptionalSubscript=false, reportIncompatibleVariableOverride=false
"""The ways in which user code misbehaves, whatever calls it; worker processes import this by name.

A way is a function of where it happens (`At`): it raises, or returns what the user code returns instead of results. A
sample says by its second number which way it wants, and the first such sample of a batch has its will.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import inspect
import locale
import math
import os
import random
import resource
import signal
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections import UserDict, UserList, deque
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from forebay import Failure, Media, RequestError
from forebay.types.call import After

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FINE = -1
"""The way of a sample that wants none."""
FOLDER = "FOREBAY_MISBEHAVE"
"""Variable of the environment: where to note what the test waits for."""
WAY = "FOREBAY_MISBEHAVE_WAY"
"""Another one: the way of a model's `load` or `unload`."""


class At(NamedTuple):
    """Where a way happens.

    Attributes:
        given: What the user code was given, as it was given.
        mine: Place of the sample that wants it.
        fine: The results as they should be.
    """

    given: Any
    mine: int
    fine: list[Any]

    def instead(self, value: Any) -> list[Any]:
        """The results, with another one for the sample."""
        return [value if place == self.mine else result for place, result in enumerate(self.fine)]


class Way(NamedTuple):
    """One way to misbehave.

    Attributes:
        kind: What sort it is.
        text: What the code does.
        act: Does it.
        hangs: Whether it does not end before `release`, or before its process does.
        exits: Whether it ends its process.
        hook: Where it is done, if not in what answers.
    """

    kind: str
    name: str
    text: str
    act: Callable[[At], Any]
    hangs: bool = False
    exits: bool = False
    hook: str = ""

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.act)

    @property
    def is_generator(self) -> bool:
        return inspect.isgeneratorfunction(self.act)


WAYS: list[Way] = []


def way(text: str, **facts: Any) -> Callable[[Callable[[At], Any]], Callable[[At], Any]]:
    def add(act: Callable[[At], Any]) -> Callable[[At], Any]:
        kind = act.__name__.partition("_")[0]
        WAYS.append(Way(kind, act.__name__, text, act, **facts))
        return act

    return add


def number_of(name: str) -> int:
    return next(number for number, one in enumerate(WAYS) if one.name == name)


def wanted(asked: Sequence[int], hook: str = "") -> tuple[int, Way] | None:
    """The first sample that wants a way of this hook, and which."""
    for place, number in enumerate(asked):
        if number >= 0 and WAYS[number].hook == hook:
            return place, WAYS[number]
    return None


def perform(given: Any, asked: Sequence[int], fine: list[Any], hook: str = "") -> Any:
    """What user code returns that was asked for these ways."""
    found = wanted(asked, hook)
    if found is None:
        return fine
    place, one = found
    return one.act(At(given, place, fine))


async def perform_async(given: Any, asked: Sequence[int], fine: list[Any], hook: str = "") -> Any:
    result = perform(given, asked, fine, hook)
    return await result if inspect.iscoroutine(result) and wanted(asked, hook)[1].is_async else result


def steps(given: Any, asked: Sequence[int], fine: list[Any]) -> Any:
    """The same as a generator of two steps."""
    found = wanted(asked)
    if found is not None and found[1].is_generator:
        yield from found[1].act(At(given, found[0], fine))
        return
    yield perform(given, asked, fine)
    yield fine


async def steps_async(given: Any, asked: Sequence[int], fine: list[Any]) -> Any:
    found = wanted(asked)
    if found is not None and found[1].is_generator:
        for step in found[1].act(At(given, found[0], fine)):
            yield step
        return
    yield await perform_async(given, asked, fine)
    yield fine


# What the test is told, and how it lets go of what hangs beside it


released = threading.Event()
_to_let_go: list[Callable[[], object]] = []
kept: list[Any] = []


def note(name: str, text: object = "") -> None:
    with Path(os.environ[FOLDER], name).open("a") as file:
        file.write(f"{text}\n")


def hanging() -> None:
    note("began", os.getpid())


def release() -> None:
    """Let everything in this process go on that hangs, or was left behind."""
    released.set()
    while _to_let_go:
        _to_let_go.pop()()


def once_answered(act: Callable[[], object]) -> None:
    """Do something in a thread, after the request that asks for it was answered."""

    def wait() -> None:
        while not answered.exists():
            time.sleep(0.002)
        act()

    answered = Path(os.environ[FOLDER], "answered")
    threading.Thread(target=wait, daemon=True).start()


def again() -> None:
    released.clear()


# Raise


class Own(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Cursed(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class NoInit(RequestError):
    def __init__(self) -> None:
        pass


class NoTrace(Exception):
    @property
    def __traceback__(self) -> Any:
        raise RuntimeError("no trace")


def cycle() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def deep(levels: int = 100_000) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


def chained() -> ValueError:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__context__ = second, first
    return first


def _raises(name: str, text: str, make: Callable[[], BaseException]) -> None:
    def act(at: At) -> Any:
        raise make()

    WAYS.append(Way("raise", f"raise_{name}", f"raises {text}", act))


_raises("exception", "an exception", lambda: ValueError("by hand"))
_raises("own", "a `BaseException` of its own", lambda: Own("by hand"))
_raises("keyboard_interrupt", "`KeyboardInterrupt`", lambda: KeyboardInterrupt("by hand"))
_raises("system_exit", "`SystemExit`, as `sys.exit()` does", lambda: SystemExit(3))
_raises("generator_exit", "`GeneratorExit`", lambda: GeneratorExit("by hand"))
_raises("cancelled", "`CancelledError`", lambda: asyncio.CancelledError("by hand"))
_raises("stop_iteration", "`StopIteration`", lambda: StopIteration("by hand"))
_raises("stop_async_iteration", "`StopAsyncIteration`", lambda: StopAsyncIteration("by hand"))
_raises("memory", "`MemoryError`", MemoryError)
_raises("group", "a group of errors", lambda: BaseExceptionGroup("several", [ValueError("a"), KeyboardInterrupt()]))
_raises("mute", "an error whose text cannot be made", Mute)
_raises("cursed", "an error whose `__str__` raises `KeyboardInterrupt`", Cursed)
_raises("no_trace", "an error whose `__traceback__` raises", NoTrace)
_raises("surrogate", "an error with a surrogate in its text", lambda: ValueError("caf\udce9"))
_raises("huge", "an error with a text of ten megabytes", lambda: ValueError("x" * 10_000_000))
_raises("chained", "an error that is its own cause's cause", chained)
_raises("request_error", "`RequestError`", lambda: RequestError("no", detail={"path": "$"}))
_raises("detail_cycle", "`RequestError` with a detail that holds itself", lambda: RequestError("no", detail=cycle()))
_raises(
    "detail_object",
    "`RequestError` with a detail that cannot be sent",
    lambda: RequestError("no", detail={"it": object()}),
)
_raises("no_init", "a `RequestError` whose `__init__` did nothing", NoInit)


@way("calls itself for ever (`RecursionError`)")
def raise_recursion(at: At) -> Any:
    return raise_recursion(at)


@way("raises in `preprocess`", hook="preprocess")
def raise_in_preprocess(at: At) -> Any:
    raise Own("by hand")


@way("raises in `postprocess`", hook="postprocess")
def raise_in_postprocess(at: At) -> Any:
    raise KeyboardInterrupt


@way("raises in `batch_key`", hook="batch_key")
def raise_in_batch_key(at: At) -> Any:
    raise Own("by hand")


@way("gives a `batch_key` that has no hash", hook="batch_key")
def return_key_without_hash(at: At) -> Any:
    return [[]]


class Unlike:
    """Is equal to nothing without an error."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparing")


@way("gives a `batch_key` whose `__eq__` raises", hook="batch_key")
def return_key_without_eq(at: At) -> Any:
    return [Unlike()]


@way("raises in `start`", hook="start")
def raise_in_start(at: At) -> Any:
    raise Own("by hand")


@way("raises in `finish`", hook="finish")
def raise_in_finish(at: At) -> Any:
    raise Own("by hand")


@way("raises in `load`", hook="load")
def raise_in_load(at: At) -> Any:
    raise Own("by hand")


@way("calls `sys.exit()` in `load`", hook="load")
def exit_in_load(at: At) -> Any:
    sys.exit(3)


@way("calls `os._exit(0)` in `load`", hook="load", exits=True)
def exit_at_once_in_load(at: At) -> Any:
    os._exit(0)


@way("raises in `unload`", hook="unload")
def raise_in_unload(at: At) -> Any:
    raise Own("by hand")


@way("calls `sys.exit()` in `unload`", hook="unload")
def exit_in_unload(at: At) -> Any:
    sys.exit(3)


@way("sleeps for ever in `unload`", hook="unload", hangs=True)
def hang_in_unload(at: At) -> Any:
    released.wait()


# Return


class Liar(list):
    """A list of another length than it says."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter([])


class Wrong(list):
    def __len__(self) -> int:
        raise RuntimeError("no length")


class NoIteration(list):
    def __iter__(self) -> Any:
        raise RuntimeError("no iteration")


class Rude:
    """An object that can do nothing."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparing")

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class Fake:
    """Says that it is whatever it is asked for."""

    __class__ = property(lambda self: KeyboardInterrupt)  # type: ignore[assignment]


def _returns(name: str, text: str, make: Callable[[At], Any]) -> None:
    def act(at: At) -> Any:
        return make(at)

    WAYS.append(Way("return", f"return_{name}", f"returns {text}", act))


_returns("none", "None", lambda at: None)
_returns("nothing", "an empty list", lambda at: [])
_returns("too_few", "one result too few", lambda at: at.fine[:-1])
_returns("too_many", "one result too many", lambda at: [*at.fine, 1])
_returns("number", "a number", lambda at: 3)
_returns("text", "a text", lambda at: "ab"[: len(at.fine)])
_returns("bytes", "bytes", lambda at: b"ab"[: len(at.fine)])
_returns("set", "a set", lambda at: {1, 2})
_returns("dict", "a dict", lambda at: dict(enumerate(at.fine)))
_returns("user_dict", "a mapping that is not a dict", lambda at: UserDict(enumerate(at.fine)))
_returns("proxy", "a read-only mapping", lambda at: MappingProxyType(dict(enumerate(at.fine))))
_returns("generator", "a generator", lambda at: (one for one in at.fine))
_returns("class", "a class", lambda at: list)
_returns("exception_itself", "an exception instead of a list", lambda at: ValueError("returned"))
_returns("coroutine", "a coroutine that nobody awaits", lambda at: at.instead(_never_awaited()))
_returns("user_list", "a sequence that is not a list", lambda at: UserList(at.fine))
_returns("deque", "a deque", lambda at: deque(at.fine))
_returns("liar", "a list whose length is a lie", lambda at: Liar(at.fine))
_returns("no_length", "a list whose `__len__` raises", lambda at: Wrong(at.fine))
_returns("no_iteration", "a list whose `__iter__` raises", lambda at: NoIteration(at.fine))
_returns("error", "an exception for one sample", lambda at: at.instead(ValueError("this one")))
_returns("own_error", "a `BaseException` of its own for one sample", lambda at: at.instead(Own("this one")))
_returns("failure", "`Failure(ValueError())` for one sample", lambda at: at.instead(Failure(ValueError("this one"))))
_returns("failure_of_text", "`Failure` that holds no error", lambda at: at.instead(Failure("text")))
_returns("nan", "NaN for one sample", lambda at: at.instead(math.nan))
_returns("surrogate", "a text with a surrogate for one sample", lambda at: at.instead("caf\udce9"))
_returns("cycle", "a list that holds itself for one sample", lambda at: at.instead(cycle()))
_returns("deep", "a list of a hundred thousand levels for one sample", lambda at: at.instead(deep()))
_returns("huge", "forty megabytes for one sample", lambda at: at.instead("x" * 40_000_000))
_returns("object", "an object for one sample", lambda at: at.instead(object()))
_returns("rude", "an object that can do nothing for one sample", lambda at: at.instead(Rude()))
_returns("fake", "an object that lies about its class for one sample", lambda at: at.instead(Fake()))
_returns("int_huge", "an integer of a thousand digits for one sample", lambda at: at.instead(10**1000))
_returns("after", "`After` for one sample", lambda at: at.instead(After(1, lambda: None)))
_returns("media", "`Media` for one sample", lambda at: at.instead(Media(b"picture", "image/png")))


async def _never() -> None:
    pass


def _never_awaited() -> Any:
    warnings.simplefilter("ignore", RuntimeWarning)  # it says itself that it was never awaited
    return _never()


# Hang


@way("sleeps for ever", hangs=True)
def hang_sleep(at: At) -> Any:
    hanging()
    while not released.wait(0.01):
        pass
    return at.fine


@way("computes for ever", hangs=True)
def hang_busy(at: At) -> Any:
    hanging()
    while not released.is_set():
        pass
    return at.fine


@way("reads from a pipe that nobody writes to", hangs=True)
def hang_read(at: At) -> Any:
    reader, writer = os.pipe()
    _to_let_go.append(lambda: os.close(writer))
    hanging()
    os.read(reader, 1)
    os.close(reader)
    return at.fine


@way("waits for a lock that it holds itself", hangs=True)
def hang_lock(at: At) -> Any:
    lock = threading.Lock()
    _to_let_go.append(lock.release)
    lock.acquire()
    hanging()
    lock.acquire()
    return at.fine


@way("awaits for ever", hangs=True)
async def hang_await(at: At) -> Any:
    hanging()
    await asyncio.Event().wait()


@way("awaits for ever and swallows its cancellation", hangs=True)
async def hang_swallow(at: At) -> Any:
    hanging()
    while not released.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            pass
    return at.fine


@way("cancels its own task")
async def raise_cancel_itself(at: At) -> Any:
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


@way("leaves a task behind that raises")
async def keep_task(at: At) -> Any:
    async def fails() -> None:
        raise ValueError("nobody looks")

    kept.append(asyncio.ensure_future(fails()))
    return at.fine


@way("yields for ever", hangs=True)
def hang_yield(at: At) -> Any:
    hanging()
    while not released.is_set():
        yield at.fine
        time.sleep(0.001)


@way("raises, and yields on while it is closed")
def raise_unclosed(at: At) -> Any:
    try:
        yield at.fine
        raise ValueError("in the middle")
    finally:
        yield at.fine


@way("raises while its generator is closed")
def raise_at_close(at: At) -> Any:
    try:
        yield at.fine
        yield [1]
    finally:
        raise Own("at the end")


# Exit


@way("calls `os._exit(0)`", exits=True)
def exit_at_once(at: At) -> Any:
    os._exit(0)


@way("kills its own process (SIGKILL)", exits=True)
def exit_kill(at: At) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@way("writes to address 0 (SIGSEGV)", exits=True)
def exit_segfault(at: At) -> Any:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.memset(0, 1, 1)


@way("aborts (SIGABRT)", exits=True)
def exit_abort(at: At) -> Any:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


@way("forks a child and kills itself", exits=True)
def exit_with_child(at: At) -> Any:
    _forked()
    os._exit(1)


@way("closes the sockets of its process", exits=True)
def exit_sockets(at: At) -> Any:
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
    return at.fine


# Fork


def _forked() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        while True:
            time.sleep(60)
    note("children", child)


@way("forks a child that lives on and holds its sockets")
def fork_child(at: At) -> Any:
    _forked()
    return at.fine


@way("forks a child that ends and is never waited for")
def fork_zombie(at: At) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os._exit(0)
    note("children", child)
    return at.fine


# Print


@way("prints megabytes")
def print_much(at: At) -> Any:
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * 2_000_000 + "\n")
    return at.fine


@way("prints a surrogate")
def print_surrogate(at: At) -> Any:
    print("caf\udce9")
    return at.fine


@way("closes its standard output and error")
def print_closed(at: At) -> Any:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.close()
    for number in (1, 2):
        with contextlib.suppress(OSError):
            os.close(number)
    return at.fine


@way("puts an object without methods in place of `sys.stdout` and `sys.stderr`")
def print_replaced(at: At) -> Any:
    sys.stdout = sys.stderr = object()
    return at.fine


# Keep


@way("keeps what it was given, and what it returns")
def keep_batch(at: At) -> Any:
    kept.append((at.given, at.fine))
    return at.fine


@way("returns the same list again and again, and changes it later")
def keep_results(at: At) -> Any:
    results = list(at.fine)
    once_answered(results.clear)
    return results


@way("makes an event loop of its own and keeps it")
def keep_loop(at: At) -> Any:
    kept.append(asyncio.new_event_loop())
    return at.fine


@way("keeps its own frame and traceback")
def keep_frame(at: At) -> Any:
    kept.append(inspect.currentframe())
    try:
        raise ValueError("kept")
    except ValueError as error:
        kept.append(error)
    return at.fine


@way("never closes what it has opened")
def keep_file(at: At) -> Any:
    kept.append(os.open(os.devnull, os.O_RDONLY))
    return at.fine


# Mutate


@way("empties the list it was given")
def mutate_clear(at: At) -> Any:
    at.given.clear()
    return at.fine


@way("adds to the list it was given")
def mutate_append(at: At) -> Any:
    at.given.append(at.given[0])
    return at.fine


@way("empties the list it was given and returns it")
def mutate_cleared(at: At) -> Any:
    at.given.clear()
    return at.given


@way("writes into the samples it was given")
def mutate_samples(at: At) -> Any:
    at.given[at.mine][0] = 12345
    return at.fine


@way("empties `os.environ`")
def mutate_environ(at: At) -> Any:
    folder = os.environ[FOLDER]
    os.environ.clear()
    os.environ[FOLDER] = folder
    return at.fine


@way("changes the working folder to one that is then removed")
def mutate_cwd(at: At) -> Any:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    Path(folder).rmdir()
    return at.fine


@way("ignores signals and takes their handlers")
def mutate_signals(at: At) -> Any:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        with contextlib.suppress(ValueError):  # not in this thread
            signal.signal(number, signal.SIG_IGN)
    return at.fine


@way("changes locale, umask, nice value and random seed")
def mutate_settings(at: At) -> Any:
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, "C")
    os.umask(0o777)
    os.nice(1)
    random.seed(0)
    return at.fine


@way("empties `sys.path` and takes modules out of `sys.modules`")
def mutate_imports(at: At) -> Any:
    sys.path.clear()
    for name in ("json", "asyncio", "socket", "forebay.errors", "forebay.workers.wire.frames"):
        sys.modules.pop(name, None)
    return at.fine


@way("turns the garbage collector off")
def mutate_gc(at: At) -> Any:
    gc.disable()
    return at.fine


@way("makes warnings errors")
def mutate_warnings(at: At) -> Any:
    warnings.simplefilter("error")
    return at.fine


@way("sets the switch interval to ten seconds")
def mutate_switch_interval(at: At) -> Any:
    sys.setswitchinterval(10)
    return at.fine


@way("replaces the hooks for uncaught errors with ones that raise")
def mutate_hooks(at: At) -> Any:
    def hook(*_: Any) -> None:
        raise Own("in a hook")

    sys.excepthook = threading.excepthook = sys.unraisablehook = hook
    return at.fine


@way("takes all descriptors that its process may have", exits=False)
def mutate_descriptors(at: At) -> Any:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    with contextlib.suppress(OSError):
        while True:
            kept.append(os.open("/dev/null", os.O_RDONLY))
    return at.fine


@way("sets a profile function that raises")
def mutate_profile(at: At) -> Any:
    def profile(*_: Any) -> None:
        sys.setprofile(None)
        raise Own("in the profile")

    sys.setprofile(profile)
    return at.fine


# Threads


@way("starts a thread that raises")
def thread_raises(at: At) -> Any:
    def fail() -> None:
        raise ValueError("in a thread")

    thread = threading.Thread(target=fail, daemon=True)
    thread.start()
    thread.join()
    return at.fine


@way("starts a thread that never ends and is not a daemon")
def thread_for_ever(at: At) -> Any:
    threading.Thread(target=released.wait).start()
    return at.fine


@way("starts a hundred threads")
def thread_many(at: At) -> Any:
    for _ in range(100):
        threading.Thread(target=released.wait, daemon=True).start()
    return at.fine


@way("starts a thread that changes results after they were answered")
def thread_late(at: At) -> Any:
    results = list(at.fine)
    once_answered(lambda: results.extend([None] * 7))
    return results


@way("starts a thread that sends its own process signals it should not")
def thread_signals(at: At) -> Any:
    thread = threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGTERM), daemon=True)
    thread.start()
    thread.join()
    return at.fine


# Last, for it stays so in the worker


@way("sets the recursion limit to 120")
def mutate_recursion_limit(at: At) -> Any:
    sys.setrecursionlimit(120)
    return at.fine
