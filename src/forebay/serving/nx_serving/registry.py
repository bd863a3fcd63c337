# SPDX-License-Identifier: Apache-2.0
"""The started servings of this program by name, and how they are called by it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from forebay.errors import ConfigError, InvalidRequest
from forebay.serving.nx_serving.partitions import missing

if TYPE_CHECKING:
    from forebay.serving.nx_serving.started_serving import ServingProcess

    Where = Literal["any", "local", "distributed"]
    Before = Callable[[Any], Any]


class Cluster(Protocol):
    """Servings of other programs, as this one sees them; `forebay.cluster.join` makes one."""

    def changed(self) -> None:
        """Note that servings of this program have started or stopped."""
        ...

    def batched_run(self, name: str, given: Any, before: Before | None, timeout_s: float | None) -> Any:
        """Execute an input on a serving of a member; `before` is the distributed preprocessing."""
        ...

    async def batched_run_async(self, name: str, given: Any, before: Before | None, timeout_s: float | None) -> Any:
        """Execute an input on a serving of a member."""
        ...


_lock = threading.Lock()
_running: dict[str, ServingProcess[Any, Any]] = {}
_starting: set[str] = set()
_cluster: Cluster | None = None


def _renew() -> None:
    global _lock  # noqa: PLW0603 - a thread that is not in a forked child may have held it
    _lock = threading.Lock()
    _starting.clear()  # by threads that are not here


os.register_at_fork(after_in_child=_renew)


@contextmanager
def taking(name: str) -> Generator[None]:
    """Keep a name from others while a process starts, which is known under it once it has registered.

    Raises:
        ConfigError: The name is taken.
    """
    with _lock:
        taken = _running.get(name)
        if name in _starting or (taken is not None and not taken.is_forked):
            raise ConfigError(
                f"a serving named {name!r} is running already; stop it first, or start this one as another name"
            )
        _starting.add(name)
    try:
        yield
    finally:
        with _lock:
            _starting.discard(name)


def register(process: ServingProcess[Any, Any]) -> None:
    """Make a process that has started known under its name."""
    with _lock:
        _running[process.name] = process
    _tell()


def forget(process: ServingProcess[Any, Any]) -> None:
    """Free the name of a process."""
    with _lock:
        if _running.get(process.name) is not process:
            return
        del _running[process.name]
    _tell()


def find(name: str) -> ServingProcess[Any, Any] | None:
    """Return the process of this name."""
    return _running.get(name)


def running() -> list[ServingProcess[Any, Any]]:
    """Return all processes that have a name."""
    with _lock:
        return list(_running.values())


def join(cluster: Cluster | None) -> None:
    """Have servings that do not run here looked for in a cluster; None looks for them nowhere else."""
    global _cluster  # noqa: PLW0603 - a program is in one cluster at most
    _cluster = cluster


def cluster() -> Cluster | None:
    """Return the cluster that this program has joined."""
    return _cluster


def require_joined(what: str) -> Cluster:
    """Return the cluster that this program has joined.

    Raises:
        ConfigError: It has joined none, and `what` means nothing then.
    """
    if _cluster is None:
        raise ConfigError(
            f"{what} is for programs in a cluster, and this one has joined none: call forebay.cluster.join(ADDRESS) "
            "first, or leave it out"
        )
    return _cluster


def batched_run(
    name: str | tuple[Where, str],
    given: Any,
    distributed_preprocessing: Before | None = None,
    *,
    timeout_s: float | None = None,
    tenant: str | None = None,
    where: Where = "any",
) -> Any:
    """Execute an input on the serving that was started under this name, in batches with what other callers hand in.

    Args:
        name: What it was started as; `("distributed", name)` is another way to say `where`.
        given: What the client preprocessing of that serving takes. For a serving of another program: plain data, arrays
            of NumPy and batches of them, or an iterator of these, which is sent as it is consumed there.
        distributed_preprocessing: Called with `given` before it is sent to another program; the result is sent.
        timeout_s: Time after which the answer is of no use; None waits for it.
        tenant: Whose call it is, for a serving of this program that has tenants.
        where: `local` for a serving of this program; `any` for one of the cluster if there is none here; `distributed`
            for one of the cluster even if there is one here.

    Raises:
        ServingNotFound: No serving runs under this name.
        Unavailable: The program that executed it was lost.
        ConfigError: The program has joined no cluster, and something was asked for that only a cluster has.
        ForebayError: See `ServingProcess.batched_run`.
    """
    called, found = _found(name, where, distributed_preprocessing)
    if found is not None:
        return found.batched_run(given, timeout_s=timeout_s, tenant=tenant)
    return _joined(called, tenant).batched_run(called, given, distributed_preprocessing, timeout_s)


async def batched_run_async(
    name: str | tuple[Where, str],
    given: Any,
    distributed_preprocessing: Before | None = None,
    *,
    timeout_s: float | None = None,
    tenant: str | None = None,
    where: Where = "any",
) -> Any:
    """Execute an input on the serving that was started under this name; see `batched_run`."""
    called, found = _found(name, where, distributed_preprocessing)
    if found is not None:
        return await found.batched_run_async(given, timeout_s=timeout_s, tenant=tenant)
    return await _joined(called, tenant).batched_run_async(called, given, distributed_preprocessing, timeout_s)


def _found(
    name: str | tuple[Where, str], where: Where, before: Before | None
) -> tuple[str, ServingProcess[Any, Any] | None]:
    """Return the name of the serving that is meant, and its process if that is to execute; else a member is."""
    if isinstance(name, tuple):
        if len(cast("tuple[Any, ...]", name)) != 2:
            raise ConfigError(
                f"name of a serving: expected a string or a pair such as ('distributed', 'clip'), got {name!r}"
            )
        where, name = name
    if where not in {"any", "local", "distributed"}:
        raise ConfigError(f"where: expected 'any', 'local' or 'distributed', got {where!r}")
    if before is not None:
        require_joined("distributed_preprocessing")
    if where == "distributed":
        require_joined("where='distributed'")
        return name, None
    process = find(name)
    if process is None and (where == "local" or _cluster is None):
        raise missing(name)
    return name, process


def _joined(name: str, tenant: str | None) -> Cluster:
    if _cluster is None:  # it has left meanwhile
        raise missing(name)
    if tenant is not None:
        raise InvalidRequest(
            f"tenant is {tenant!r:.100}, and {name!r} runs in another program, which hears of no tenants; leave it out"
        )
    return _cluster


def _tell() -> None:
    if _cluster is not None:
        _cluster.changed()
