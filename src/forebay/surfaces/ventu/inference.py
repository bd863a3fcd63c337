# SPDX-License-Identifier: Apache-2.0
"""From the bytes of requests to the bytes of answers: parse, validate, run the hooks, validate, write.

No socket and no HTTP: the HTTP faces ask for one answer at a time, the socket worker and the worker processes of
`forebay serve` for a batch of them. Whatever is wrong with one request or its result is its own outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, cast

import msgspec

from forebay.errors import BadOutcome
from forebay.surfaces.ventu.media_codecs import Serialisation, Unreadable
from forebay.surfaces.ventu.schema import Invalid, Schema
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from prometheus_client import Summary

    from forebay.surfaces.ventu.config import Config
    from forebay.surfaces.ventu.metrics import Metrics


class Answered(msgspec.Struct, frozen=True):
    """A result, written in the service's serialisation."""

    body: bytes | str


class Garbled(msgspec.Struct, frozen=True):
    """The body could not be parsed."""

    reason: str


class BodyRefused(msgspec.Struct, frozen=True):
    """The body does not fit the request schema.

    Attributes:
        reason: Why, for the log.
        body: The list of problems, written in the service's serialisation.
    """

    reason: str
    body: bytes | str


class UnfitResult(msgspec.Struct, frozen=True):
    """The model's result does not fit the response schema; see `BodyRefused`."""

    reason: str
    body: bytes | str


class HookFailed(msgspec.Struct, frozen=True):
    """The user's code failed."""

    error: BaseException


Outcome: TypeAlias = Answered | Garbled | BodyRefused | UnfitResult | HookFailed


class ModelHooks(Protocol):
    """What a model brings."""

    max_body_bytes: ClassVar[int]
    use_msgpack: bool
    config: Config

    def health_check(self) -> bool | None:
        """Run the example."""
        ...

    def preprocess(self, data: Any) -> Any:
        """Prepare one request."""
        ...

    def inference(self, data: Any) -> Any:
        """Run one prepared request."""
        ...

    def batch_inference(self, batch: list[Any]) -> Any:
        """Run several prepared requests; one result for each."""
        ...

    def postprocess(self, data: Any) -> Any:
        """Finish one result."""
        ...


class Steps:
    """Runs the hooks in their order and takes the time of each."""

    def __init__(self, hooks: ModelHooks, metrics: Metrics) -> None:
        self._hooks = hooks
        self._metrics = metrics

    def one(self, item: Any) -> Any:
        """Return the result of one item; raises what a hook raised."""
        hooks, times = self._hooks, self._metrics.single
        for name, step in (
            ("preprocess", hooks.preprocess),
            ("inference", hooks.inference),
            ("postprocess", hooks.postprocess),
        ):
            with times.labels(process=name).time():
                item = step(item)
        return item

    def many(self, items: Sequence[Any]) -> list[Any]:
        """Return the result of each item, or how it failed; `batch_inference` sees only what could be prepared."""
        hooks, times = self._hooks, self._metrics.batch
        found = _each(hooks.preprocess, items, "preprocess", times)
        ready = [value for value in found if type(value) is not HookFailed]
        if not ready:
            return found
        with times.labels(process="inference").time():
            results, error = caught(lambda: _checked(hooks.batch_inference(ready), len(ready)))
        if error is not None:
            failed = HookFailed(error)
            return [value if type(value) is HookFailed else failed for value in found]
        finished = iter(_each(hooks.postprocess, results, "postprocess", times))
        return [value if type(value) is HookFailed else next(finished) for value in found]


class Inference:
    """A service without a transport."""

    def __init__(self, steps: Steps, request: Schema, response: Schema, media: Serialisation, metrics: Metrics) -> None:
        self.media = media
        self._steps = steps
        self._request = request
        self._response = response
        self._invalid = metrics.invalid

    def one(self, body: bytes) -> Outcome:
        """Answer one request with `inference`."""
        item = self._read(body)
        if isinstance(item, Outcome):
            return item
        result, error = caught(self._steps.one, item)
        return self._written(result) if error is None else HookFailed(error)

    def many(self, bodies: Sequence[bytes]) -> list[Outcome]:
        """Answer a batch with `batch_inference`, which sees only the requests that are valid."""
        read = [self._read(body) for body in bodies]
        valid = [item for item in read if not isinstance(item, Outcome)]
        results = iter(self._steps.many(valid)) if valid else iter(())
        return [item if isinstance(item, Outcome) else self._written(next(results)) for item in read]

    def _read(self, body: bytes) -> Any:
        """Return the request's object, or the outcome that a wrong one has."""
        item, error = caught(lambda: self._request.parse(self.media.loads(body)))
        if error is None:
            return item
        if isinstance(error, Unreadable):
            return Garbled(str(error))
        if isinstance(error, Invalid):
            self._invalid.inc()
            return self._refused(BodyRefused, error)
        return HookFailed(error)

    def _written(self, result: Any) -> Outcome:
        if type(result) is HookFailed:
            return result
        body, error = caught(self._body, result)
        if error is None:
            return Answered(body)
        return self._refused(UnfitResult, error) if isinstance(error, Invalid) else HookFailed(error)

    def _refused(self, kind: type[BodyRefused | UnfitResult], error: Invalid) -> Outcome:
        body, failure = caught(self.media.problems, error.errors)  # the user's validators word them
        return kind(str(error), body) if failure is None else HookFailed(failure)

    def _body(self, result: Any) -> bytes | str:
        value = self.media.plain(result)
        if not isinstance(result, self._response.model):
            self._response.parse(value)
        return self.media.dumps(value)


def _each(step: Callable[[Any], Any], items: Sequence[Any], name: str, times: Summary) -> list[Any]:
    """Do one step for each item that has not failed before."""
    made: list[Any] = []
    with times.labels(process=name).time():
        for item in items:
            value, error = caught(step, item)
            made.append(value if error is None else HookFailed(error))
    return made


def _checked(results: Any, count: int) -> list[Any]:
    """Return the results of a batch as a list.

    Raises:
        BadOutcome: If there is not exactly one for each item, in an order.
    """
    if isinstance(results, str | bytes | Mapping | set | frozenset) or not hasattr(results, "__iter__"):
        found = type(cast("object", results)).__name__
        msg = f"batch_inference returned a {found}; expected a list with one result for each of {count} requests"
        raise BadOutcome(msg)
    made = list(results)
    if len(made) != count:
        raise BadOutcome(f"batch_inference returned {len(made)} results for {count} requests")
    return made
