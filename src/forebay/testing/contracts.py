# SPDX-License-Identifier: Apache-2.0
"""Contracts as functions: each raises an AssertionError that says which promise was broken, by what."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.testing.memory_client import Client, client
from forebay.types.batch import EntryBatch
from forebay.types.call import Failure, Request
from forebay.types.file import File

if TYPE_CHECKING:
    from forebay.serving.models.model import Model
    from forebay.testing.answers import Answer
    from forebay.workers.pool import Pool

MSGPACK: Final = {"content-type": "application/msgpack", "accept": "application/msgpack"}
PATIENCE_S: Final = 60.0


def check_model(
    model: type[Model], samples: Sequence[Any], *, bad: Sequence[Any] = (), tolerance: float = 1e-6, **settings: Any
) -> None:
    """Hold a model to what its clients rely on.

    - Each sample is answered, and alone as in company: its result does not depend on who shares its batch, or on the
      order in which they came.
    - JSON and msgpack give the same.
    - A bad sample gets an error, and nobody else does.

    Args:
        samples: Some that are answered; several, and unlike each other.
        bad: Some that are refused.
        tolerance: How much numbers may differ, relative to their size and absolutely: the sums of a network depend on
            the size of its batch.
        **settings: As for `forebay.testing.client`.

    Raises:
        AssertionError: If it breaks one of these promises.
    """
    with client(model, **settings) as served:
        alone = [_answered(served, sample, f"samples[{number}]") for number, sample in enumerate(samples)]
        for told, order in (("in company", range(len(samples))), ("in reverse", range(len(samples))[::-1])):
            answers = served.ask_all([samples[number] for number in order])
            for number, answer in zip(order, answers, strict=True):
                _require_same(alone[number], answer, f"samples[{number}], {told}", tolerance)
        for number, sample in enumerate(samples):
            if not isinstance(sample, bytes):
                packed = served.request("POST", "/", msgspec.msgpack.encode(sample, enc_hook=_plain), MSGPACK)
                _require_same(alone[number], packed, f"samples[{number}], as msgpack", tolerance)
        for number, sample in enumerate(bad):
            refused = served.ask(sample)
            if refused.is_ok:
                raise AssertionError(f"bad[{number}] is answered with {refused.value!r:.200}, an error is expected")
            answers = served.ask_all([*samples, sample])
            for neighbour, answer in enumerate(answers[:-1]):
                _require_same(alone[neighbour], answer, f"samples[{neighbour}], beside bad[{number}]", tolerance)
            if answers[-1].status != refused.status:
                raise AssertionError(f"bad[{number}] gets {refused.status} alone and {answers[-1].status} in company")


async def check_pool(make: Callable[[], Pool], *, batches: int = 20) -> None:
    """Hold a pool to what the batcher relies on.

    - `start` makes slots idle, a submitted batch takes one of them, its answer gives it back.
    - `done` is called exactly once for a batch, on the loop, with one outcome for each entry, in order.
    - `stop` answers what still runs, and leaves no slot idle.

    Args:
        make: Makes a pool whose runner returns the body of each item.
        batches: How many are run.

    Raises:
        AssertionError: If it breaks one of these promises.
    """
    pool = make()
    here = threading.get_ident()
    answers: dict[EntryBatch, list[tuple[int, Any]]] = {}
    came = asyncio.Event()

    def done(batch: EntryBatch, outcomes: Sequence[Any]) -> None:
        answers[batch].append((threading.get_ident(), outcomes))
        came.set()

    def submit(bodies: Sequence[bytes]) -> EntryBatch:
        entries = [Request(body, _unheard) for body in bodies]
        batch = EntryBatch(entries=entries, key=None, rows=len(entries))
        answers[batch] = []
        idle = pool.idle
        pool.submit(batch, done)
        _require(pool.idle == idle - 1 or bool(answers[batch]), "a submitted batch takes a slot")
        return batch

    async def until(check: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not check():
                    came.clear()
                    await came.wait()
        except TimeoutError:
            _require(False, what)

    pool.watch(came.set)
    await asyncio.wait_for(pool.start(), PATIENCE_S)
    slots = pool.idle
    _require(slots >= 1, "a started pool has an idle slot")
    for number in range(batches):
        bodies = [b"%d.%d" % (number, entry) for entry in range(number % 5 + 1)]
        batch = submit(bodies)
        await until(lambda batch=batch: bool(answers[batch]), "a batch is answered")
        thread, outcomes = answers[batch][0]
        _require(thread == here, "`done` is called on the loop")
        _require([bytes(one) for one in outcomes] == bodies, "each entry gets its own outcome, in order")
        await until(lambda: pool.idle == slots, "an answered batch gives its slot back")
    last = [submit([b"last"]) for _ in range(slots)]
    await asyncio.wait_for(pool.stop(PATIENCE_S), 2 * PATIENCE_S)
    await until(lambda: all(answers[batch] for batch in last), "`stop` answers what still runs")
    _require(pool.idle == 0, "a stopped pool has no idle slot")
    _require(all(len(told) == 1 for told in answers.values()), "a batch is answered exactly once")
    fine = [outcomes[0] for batch in last for _, outcomes in answers[batch] if type(outcomes[0]) is not Failure]
    _require(all(bytes(one) == b"last" for one in fine), "what ends within the grace has its own outcome")


def _answered(served: Client, sample: Any, what: str) -> Answer:
    answer = served.ask(sample)
    if not answer.is_ok:
        msg = f"{what} is not answered: {answer.status} {answer.error['message']}"
        error = AssertionError(msg)
        if answer.trace:
            error.add_note(answer.trace)
        raise error
    return answer


def _require_same(alone: Answer, other: Answer, what: str, tolerance: float) -> None:
    if not other.is_ok:
        raise AssertionError(f"{what}: {other.status} {other.error['message']}; alone it is answered")
    if not _is_near(alone.value, other.value, tolerance):
        raise AssertionError(f"{what}: {other.value!r:.200}; alone it is {alone.value!r:.200}")


def _is_near(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return one == other or math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        left, right = cast("Mapping[Any, Any]", one), cast("Mapping[Any, Any]", other)
        return left.keys() == right.keys() and all(_is_near(left[key], right[key], tolerance) for key in left)
    if isinstance(one, list) and isinstance(other, list):
        rows, others = cast("list[Any]", one), cast("list[Any]", other)
        return len(rows) == len(others) and all(map(_is_near, rows, others, [tolerance] * len(rows)))
    return one == other


def _require(is_kept: bool, promise: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not is_kept:
        raise AssertionError(f"broken: {promise}")


def _plain(value: Any) -> Any:
    if isinstance(value, File):
        return value.read()
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value.tolist()


def _unheard(_request: Request, _outcome: object) -> None:
    """Take the reply to a request of a test of pools, for which nobody waits."""
