# SPDX-License-Identifier: Apache-2.0
"""How a version of a model is built and started beside those that answer, within its time; nothing is replaced here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from forebay.errors import ConfigError, InvalidRequest, ModelError
from forebay.types.failures import failure_of
from forebay.workers.user_calls.hanging_calls import Late, LoopThreads

if TYPE_CHECKING:
    from forebay.server.served import Served
    from forebay.server.versions import Version, Versions

T = TypeVar("T")


async def bring_up(
    versions: Versions, attempt: Version, make: Callable[[], Served], until: float, owner: str | None = None
) -> None:
    """Build and start a version.

    Args:
        until: When it has to be up.
        owner: The other server that the name of the model belongs to, if there is one.

    Raises:
        ForebayError: Why it cannot be.
    """
    what = f"version '{attempt.name}' of '{versions.model}'"
    served = attempt.served = await beside(make, until, what, lambda late: late.gone())
    name, version = served.endpoint.name, served.endpoint.config.version
    if (name, version) != (versions.model, attempt.name):
        msg = f"'{versions.model}' version '{attempt.name}' was wanted, and it is '{name}' version '{version}'"
        raise ConfigError(msg)
    if owner is not None and not served.is_elsewhere:
        raise InvalidRequest(f"the model '{name}' is served by its owner {owner}; give this one another `name`")
    before = versions.ready.get(attempt.name)
    if before is not None:
        _go_on_counting(served, before)
    try:
        async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
            await served.endpoint.start()
    except TimeoutError:
        raise _late(what) from None
    if served.check is not None:
        await beside(served.check, until, what)


async def beside(make: Callable[[], T], until: float, what: str, unwanted: Callable[[T], object] | None = None) -> T:
    """Call a function in a thread; one that hangs is left behind there.

    Args:
        until: When it is to be over.
        what: What it makes, for messages.
        unwanted: Given what came when nobody waited any more, on the loop.

    Raises:
        ModelError: If it is not over in time.
        ForebayError: What it raises.
    """
    made: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def done(result: Any, error: BaseException | None) -> None:
        if made.done():  # who waited was cancelled in this turn of the loop, and has not dropped the call yet
            if error is None and unwanted is not None:
                unwanted(result)
        elif error is None:
            made.set_result(result)
        else:
            made.set_exception(_late(what) if isinstance(error, Late) else failure_of(error).error)

    threads = LoopThreads(1)
    call = threads.call(make, until, done, unwanted)
    try:
        return await made
    finally:
        call.drop()
        threads.close()


def _late(what: str) -> ModelError:
    return ModelError(f"{what} was not ready in time")


def _go_on_counting(served: Served, before: Served) -> None:
    """Let the counters of a version go on from those of the version that it replaces."""
    served.endpoint.metrics = before.endpoint.metrics
    for name in served.nodes.keys() & before.nodes.keys():
        served.nodes[name].metrics = before.nodes[name].metrics
