# SPDX-License-Identifier: Apache-2.0
"""Answers HTTP requests with a project's `Handler`, in a worker process.

The process belongs to one project: its working folder, environment and module names (`cortex_handler`, `model`, ...)
are nobody else's. What a handler's methods declare is read once, at the start; a request then costs a lookup.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException

from forebay.errors import ModelError, NotFound
from forebay.surfaces.nucleus import handler_answers, handler_tensors
from forebay.surfaces.nucleus.handler import HandlerHost, match, method_parameters, shown
from forebay.surfaces.nucleus.handler_answers import Answer, Streamed
from forebay.surfaces.nucleus.handler_payload import BadPayload, parse
from forebay.surfaces.nucleus.logs import logger
from forebay.types.call import After, Failure, Item, Outcome
from forebay.types.call_signature import Arguments
from forebay.types.failures import text_of, words_of
from forebay.types.user_exceptions import answered

VERBS: Final = ("post", "get", "put", "patch", "delete")
ABOUT: Final = "about"
"""In place of a verb: asks the runner which verbs its handler has, and whether `handle_post` reads its payload."""

VERB_ARGUMENTS: Final = ("payload", "query_params", "headers")

INTERNAL_ERROR: Final = "internal server error"


def build(
    *,
    handler: str,
    config: str,
    batched: bool,
    requirements: str = "requirements.txt",
    desk: str | None = None,
    models: Mapping[str, Any] | None = None,
) -> NucleusRunner:
    """Build the runner; the reference that worker processes are given.

    Args:
        config: The project's own `config`, as YAML so that every type of its survives.
        requirements: Where the project lists its packages, for the message when one is missing.
        desk: Where the server is asked for more; None if that is not needed.
        models: What the configuration says of models; None if it has none.
    """
    runner = NucleusRunner(Path(handler), config=config, batched=batched, requirements=requirements)
    if desk is not None:
        runner.connect(desk, models)
    return runner


class Verb(msgspec.Struct, frozen=True):
    """A method of the handler that answers requests."""

    function: Callable[..., Any]
    arguments: Arguments
    wants_payload: bool


class NucleusRunner(HandlerHost):
    """Answers requests with a handler; the threads of a worker share it."""

    def __init__(self, handler: Path, *, config: str, batched: bool, requirements: str) -> None:
        super().__init__(handler, config=config, requirements=requirements)
        self._batched = batched
        self._verbs: dict[str, Verb] = {}
        self._one_batch = threading.Lock()

    def _answers(self, items: Sequence[Item]) -> Sequence[Outcome] | Any:
        """Answer requests; batches are posts only."""
        name = items[0].params["verb"]
        if name == ABOUT:
            post = self._verbs.get("post")
            return [{"verbs": list(self._verbs), "reads_posts": post is not None and post.wants_payload}]
        if name not in self._verbs:
            return [Failure(NotFound(f"the handler has no `handle_{name}`"))] * len(items)
        if self._batched and name == "post":
            outcomes = self._answer_batch(items)
        else:
            outcomes = [self._answer(item) for item in items]
        outcomes = [
            handler_tensors.settled(outcome) if handler_tensors.is_call(item) else outcome
            for item, outcome in zip(items, outcomes, strict=True)
        ]
        if any(type(one.outcome if type(one) is After else one) is Streamed for one in outcomes):
            return handler_answers.steps(outcomes, self._coroutines, _report)
        return outcomes

    def _make(self, cls: type) -> None:
        plans = verbs_of(cls, batched=self._batched)
        handler = self._construct(cls)
        for name, plan in plans.items():
            self._verbs[name] = Verb(getattr(handler, f"handle_{name}"), plan, "payload" in plan.wanted)

    def _answer(self, item: Item) -> Outcome:
        verb = self._verbs[item.params["verb"]]
        try:
            values = self._values(verb, item)
        except BadPayload as error:
            return handler_answers.refusal(error)
        return answered(lambda: self._outcome(self._call(verb, values), item), _failed)

    def _answer_batch(self, items: Sequence[Item]) -> list[Outcome]:
        verb = self._verbs["post"]
        outcomes: list[Any] = [None] * len(items)
        accepted: list[int] = []
        values: dict[str, list[Any]] = {name: [] for name in VERB_ARGUMENTS}
        for index, item in enumerate(items):
            try:
                found = self._values(verb, item)
            except BadPayload as error:
                outcomes[index] = handler_answers.refusal(error)
                continue
            accepted.append(index)
            for name, value in found.items():
                values[name].append(value)
        if accepted:
            with self._one_batch:
                results = self._call_batch(verb, values, len(accepted))
            for index, result in zip(accepted, results, strict=True):
                refused = type(result) is _Refused
                outcomes[index] = result.answer if refused else self._settled(result, items[index])
        return outcomes

    def _call_batch(self, verb: Verb, values: Mapping[str, Any], count: int) -> Sequence[Any]:
        """Call `handle_post` with lists; returns a result for each request, or the same refusal for all of them."""
        results = answered(lambda: self._call(verb, values), lambda error: _Refused(_failed(error, in_words=True)))
        if type(results) is _Refused:
            return [results] * count
        if not isinstance(results, list):
            msg = f"please return a list when using server side batching, got {type(results)}"
        else:
            found = cast("list[Any]", results)
            if len(found) == count:
                return found
            msg = (
                "please return a list with one element for each request when using server side batching, "
                f"got {len(found)} elements for {count} requests"
            )
        text = f"error: {msg}: runtime exception"
        logger.error(text)
        return [_Refused(handler_answers.text(500, text))] * count

    def _settled(self, result: Any, item: Item) -> Outcome:
        """Return the outcome of one element of a batch; what cannot be written fails alone."""
        return answered(lambda: self._outcome(result, item), _unforeseen)

    def _values(self, verb: Verb, item: Item) -> dict[str, Any]:
        """Return what a verb may want of a request; the payload is read only if it is wanted.

        Raises:
            BadPayload: If the body cannot be read.
        """
        params = item.params
        headers = Headers(raw=[(name, value) for name, value in params["headers"]])
        if handler_tensors.is_call(item):
            payload = handler_tensors.payload_of(item)
        else:
            payload = parse(headers, bytes(item.body), self._coroutines) if verb.wants_payload else None
        return {"payload": payload, "query_params": QueryParams(params["query"]), "headers": headers}

    def _call(self, verb: Verb, values: Mapping[str, Any]) -> Any:
        return self._waited(verb.arguments.call(verb.function, values))

    def _outcome(self, result: Any, item: Item) -> Outcome:
        result, callback = handler_answers.split_callback(result)
        answer: Any = (
            handler_tensors.outcome_of(result, item)
            if handler_tensors.is_call(item)
            else handler_answers.answer_of(result, lambda: _scope(item))
        )
        work = functools.partial(self._do, callback) if callback is not None else None
        background = getattr(result, "background", None)
        if background is not None and type(answer) is not Streamed:  # a streamed response runs its own
            work = functools.partial(self._do, background, work)
        return answer if work is None else After(answer, work)

    def _do(self, work: Callable[[], Any], following: Callable[[], object] | None = None) -> None:
        """Run what is to follow an answer; what it raises is logged, since nobody waits for it."""
        answered(lambda: self._waited(work()), _report_callback)
        if following is not None:
            following()


class _Refused(msgspec.Struct, frozen=True):
    """In place of a result: the answer to every request of a batch that failed."""

    answer: Answer | Failure


def verbs_of(cls: type, *, batched: bool) -> dict[str, Arguments]:
    """Return the verbs a class answers and what their methods want.

    Raises:
        ModelError: If it has none, or one that cannot be called.
    """
    names = [name for name in VERBS if callable(getattr(cls, f"handle_{name}", None))]
    if not names:
        known = ", ".join(f"`handle_{name}`" for name in VERBS)
        raise ModelError(
            f"no user-defined `handle_<verb>` method found in handler class; define at least one verb handler ({known})"
        )
    if batched and "post" not in names:
        msg = "dynamic batcher has been enabled, but no `handle_post` method could be found in the `Handler` class"
        raise ModelError(msg)
    return {name: _verb_arguments(cls, f"handle_{name}") for name in names}


def _verb_arguments(cls: type, name: str) -> Arguments:
    signature, parameters = method_parameters(cls, name)
    return match(parameters, {name: name for name in VERB_ARGUMENTS}, VERB_ARGUMENTS, shown(name, signature))


def _scope(item: Item) -> dict[str, Any]:
    """Return what a response of the handler's own making may ask of its request."""
    params = item.params
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": params["verb"].upper(),
        "path": "/",
        "query_string": params["query"],
        "headers": [(name, value) for name, value in params["headers"]],
        "extensions": {},
    }


def _failed(error: BaseException, *, in_words: bool = False) -> Answer | Failure:
    """Return the answer to a request whose handler has raised this, with its words or without."""
    if isinstance(error, HTTPException):
        return answered(
            lambda: handler_answers.http_error(error), _unforeseen
        )  # its detail and headers may be anything
    if in_words:
        _report(error)
        return handler_answers.text(500, words_of(error))
    return _unforeseen(error)


def _unforeseen(error: BaseException) -> Answer:
    _report(error)
    return handler_answers.text(500, INTERNAL_ERROR)


def _report(error: BaseException) -> None:
    logger.error("%s", text_of(error), exc_info=error)


def _report_callback(error: BaseException) -> None:
    logger.error("a callback failed after its request was answered", exc_info=error)
