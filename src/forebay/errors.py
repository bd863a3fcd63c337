# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as one tree.

    ForebayError(code, message, detail)
    ├── RequestError           the caller is at fault; the message is shown to the client
    │   ├── InvalidRequest     malformed                          INVALID_ARGUMENT
    │   │   ├── ValidationError  well-formed, wrong type or value INVALID_ARGUMENT
    │   │   └── BatchMismatch  arrays that cannot share a batch   INVALID_ARGUMENT
    │   ├── NotFound           endpoint, model, version           NOT_FOUND
    │   │   └── ServingNotFound  no serving runs under this name  NOT_FOUND
    │   ├── TooLarge           body or samples over a limit       INVALID_ARGUMENT
    │   ├── NotPrepared        something it refers to is missing  FAILED_PRECONDITION
    │   └── Cancelled          the client went away               CANCELLED
    ├── CapacityError          nobody is at fault; try again
    │   ├── QueueFull                                             RESOURCE_EXHAUSTED
    │   │   └── ShareUsed      of a tenant, in a full queue       RESOURCE_EXHAUSTED
    │   │       └── LimitReached  of a tenant, whatever the queue RESOURCE_EXHAUSTED
    │   ├── DeadlineExceeded                                      DEADLINE_EXCEEDED
    │   └── Unavailable        loading, draining, worker lost     UNAVAILABLE
    │       ├── TooLate        its answer would come after its deadline UNAVAILABLE
    │       ├── WorkerLost     and what it ran is not run again   UNAVAILABLE
    │       └── ServingStopped  stopped before the rows were run  UNAVAILABLE
    ├── UserCodeError          raised by the user's code; its traceback goes to the log only
    │   ├── RunnerFailed                                          INTERNAL
    │   ├── BadOutcome         wrong number or kind of results    INTERNAL
    │   │   └── BatchResultMismatch  fewer rows than were asked for INTERNAL
    │   └── ServingCrashed     the function of a serving raised   INTERNAL
    ├── ModelError             the model could not be loaded      UNAVAILABLE
    ├── ConfigError            a file, option or class of the user's is wrong
    └── InternalError          a defect of forebay                INTERNAL

The core only knows `Code` (the names gRPC gives them). Every protocol owns one table from `Code`,
or from a class where it is finer, to its own status: no transport's number stands here.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, ClassVar, cast


class Code(StrEnum):
    """The kinds of failure a client can be told about."""

    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    FAILED_PRECONDITION = "failed_precondition"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    UNAVAILABLE = "unavailable"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class ForebayError(Exception):
    """Root of everything forebay raises on purpose.

    Args:
        message: One sentence: what happened, what was found, what was expected, what to do.
        detail: Data a client may want to read by program; must fit in JSON.

    Attributes:
        trace: Where it came about, for the log and never for the client; empty where nobody's code was at work.
    """

    code: ClassVar[Code] = Code.INTERNAL
    trace: str = ""

    def __init__(self, message: str, *, detail: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail

    @property
    def kind(self) -> str:
        """The name under which this error crosses a process or machine border; that of its base if it is a user's."""
        return known_kind(self)


def milliseconds_until(retry_at: float, now: float) -> int:
    """Return the milliseconds, at least 1, until a client should try again; 1000 if the moment is not known (0)."""
    return max(math.ceil((retry_at - now) * 1000), 1) if retry_at else 1000


class RequestError(ForebayError):
    """The caller is at fault; sending the same again will fail again."""

    code = Code.INVALID_ARGUMENT


class InvalidRequest(RequestError):
    """The request cannot be read."""


class ValidationError(InvalidRequest):
    """The request can be read but does not fit the declared type."""


class BatchMismatch(InvalidRequest):
    """Arrays that cannot share a batch: another structure, shape, dtype, kind or device."""


class NotFound(RequestError):
    """Nothing has this name."""

    code = Code.NOT_FOUND


class UnknownModel(NotFound):
    """No model that is served has this name."""


class ServingNotFound(NotFound):
    """No started serving has this name."""


class TooLarge(RequestError):
    """More bytes or samples than the endpoint takes."""


class NotPrepared(RequestError):
    """The request is well-formed, and what it would be answered with is not there: a model that a graph names."""

    code = Code.FAILED_PRECONDITION


class Cancelled(RequestError):
    """The client went away before its answer was ready, or the rest of the body it sends is not wanted any more."""

    code = Code.CANCELLED


class CapacityError(ForebayError):
    """The server cannot answer now; trying again later may help.

    Where it is known when, its detail says so, `{"retry_after_s": 3}`, or `retry_at`.

    Attributes:
        retry_at: When that is, on the clock of `time.monotonic()`; 0 if it is not known.
        decision: What was known when a request was refused, as a `Decision`; None if no queue refused it.
    """

    code = Code.UNAVAILABLE
    retry_at: float = 0.0
    decision: tuple[Any, ...] | None = None

    def retry_ms(self, now: float) -> int:
        """Return the milliseconds after which trying again may help."""
        detail = cast("dict[str, Any]", self.detail) if isinstance(self.detail, dict) else {}
        seconds = detail.get("retry_after_s")
        return seconds * 1000 if type(seconds) is int and seconds > 0 else milliseconds_until(self.retry_at, now)


class QueueFull(CapacityError):
    """As many samples wait as the endpoint's queue may hold."""

    code = Code.RESOURCE_EXHAUSTED


class ShareUsed(QueueFull):
    """The tenant has its share of a full queue, or its request left the queue for one of a tenant that has less."""


class LimitReached(ShareUsed):
    """The tenant has used up what it may use; its detail says of what: `{"limit": "requests"}`."""

    @property
    def limit(self) -> str:
        """Which limit it was."""
        return str(cast("dict[str, Any]", self.detail).get("limit", "")) if isinstance(self.detail, dict) else ""


class DeadlineExceeded(CapacityError):
    """The request's time was over before its answer was ready."""

    code = Code.DEADLINE_EXCEEDED


class Unavailable(CapacityError):
    """Loading, draining, or the worker that held the request died."""


class TooLate(Unavailable):
    """The answer would come after the deadline of the request: it is refused before it has cost anything.

    Args:
        after_s: Seconds after which an equal request would not be refused, if nothing else came.
    """

    def __init__(self, message: str, *, detail: Any = None, after_s: float = 0.0) -> None:
        super().__init__(message, detail=detail)
        self.after_s = after_s


class WorkerLost(Unavailable):
    """The worker that held the request died, and what it had begun is not run again."""


class ServingStopped(Unavailable):
    """The serving was stopped before these rows were run."""


class UserCodeError(ForebayError):
    """The user's code failed.

    Attributes:
        is_logged: Whether the log has it; in a graph it passes several endpoints.
    """

    def __init__(self, message: str, *, detail: Any = None, trace: str = "") -> None:
        super().__init__(message, detail=detail)
        self.trace = trace
        self.is_logged = False


class RunnerFailed(UserCodeError):
    """The user's code raised."""


class BadOutcome(UserCodeError):
    """The user's code returned something other than one result for each sample."""


class BatchResultMismatch(BadOutcome):
    """The function of a serving returned fewer rows than its batch has."""


class ServingCrashed(UserCodeError):
    """The function of a serving raised; the exception is the cause of this one."""


class ModelError(ForebayError):
    """A model could not be loaded."""

    code = Code.UNAVAILABLE

    def __init__(self, message: str, *, detail: Any = None, trace: str = "") -> None:
        super().__init__(message, detail=detail)
        self.trace = trace


class ConfigError(ForebayError):
    """A file, option or class the user wrote is wrong: says where, what was found and what is allowed."""


class InternalError(ForebayError):
    """A defect of forebay itself."""


_KINDS: dict[str, type[ForebayError]] = {}


def _register(root: type[ForebayError]) -> None:
    _KINDS[root.__name__] = root
    for child in root.__subclasses__():
        _register(child)


_register(ForebayError)


def known_kind(error: ForebayError) -> str:
    """Return the name of the class in this module that an error is of, or whose subclass it is of."""
    return next(cls.__name__ for cls in type(error).__mro__ if _KINDS.get(cls.__name__) is cls)


def revive(kind: str, message: str, detail: Any = None, trace: str = "") -> ForebayError:
    """Build the error that another process named by its `kind`; an unknown kind becomes `RunnerFailed`."""
    cls = _KINDS.get(kind, RunnerFailed)
    if issubclass(cls, UserCodeError | ModelError):
        return cls(message, detail=detail, trace=trace)
    return cls(message, detail=detail)
