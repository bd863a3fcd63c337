# SPDX-License-Identifier: Apache-2.0
"""What holds for a model: what its class says, what the person says, and what of that does not go together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from forebay.batching.queue import BatchConfig, Idle
from forebay.errors import ConfigError
from forebay.serving.models.batch_keys import MethodKey
from forebay.serving.models.model import Model, ModelSettings, PlainSettings
from forebay.types.devices import Device, read_devices
from forebay.types.worker_range import WorkerRange
from forebay.workers.processes.device_binding import existing

if TYPE_CHECKING:
    from forebay.server.config import Overrides, WorkerKind
    from forebay.types.settings import Sharing


Said = TypeVar("Said", bound="PlainSettings")


def named(settings: Said, overrides: Overrides) -> Said:
    """Return what a model says about itself under the name and version that the person gave it."""
    said = {"name": overrides.name or settings.name, "version": overrides.version or settings.version}
    return msgspec.structs.replace(settings, **said)


def environment_of(overrides: Overrides) -> dict[str, str] | None:
    """Return the environment of a model's worker processes; None is that of the server."""
    return {**os.environ, **overrides.env} if overrides.env else None


def devices_of(where: str, said: Sequence[str], kind: WorkerKind) -> tuple[Device, ...]:
    """Return the devices of a model's workers.

    Raises:
        ConfigError: If they are not there, or such workers cannot be on them.
    """
    try:
        devices = read_devices(existing(said))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if kind == "inline" and any(device.cores for device in devices):
        msg = f"{where} runs inline, on the loop of the server, which cannot be bound to CPUs; use thread or process"
        raise ConfigError(msg)
    return devices


def workers_of(said: int | WorkerRange | None, devices: Sequence[Device]) -> int:
    """Return how many workers the server starts, at most: one for each device if nobody says it.

    Raises:
        ConfigError: If it is to start none.
    """
    if said == 0 or (isinstance(said, WorkerRange) and said.dial_in):
        raise ConfigError(
            f"workers is {said}, but only the models of a Python file can be served by workers that dial in; graphs, "
            "servings, model files and models of a repository need at least 1"
        )
    if isinstance(said, WorkerRange):
        return said.max
    return said or len(devices) or 1


def batching_of(where: str, settings: ModelSettings, overrides: Overrides) -> BatchConfig:
    """Return how a model is batched; raises ConfigError if model and person want what does not go together."""
    policy = overrides.policy or settings.policy
    objective_ms = overrides.latency_objective_ms or settings.latency_objective_ms
    wait_ms = overrides.max_wait_ms
    if wait_ms is None and overrides.policy is None:
        wait_ms = settings.max_wait_ms
    if policy is None and objective_ms is not None:
        msg = f"{where} has a latency objective that nothing keeps to; set policy to 'auto', or leave the objective out"
        raise ConfigError(msg)
    if policy is not None and objective_ms is None:
        msg = f"{where} has the policy '{policy}' and no objective; set latency_objective_ms, in milliseconds"
        raise ConfigError(msg)
    if policy is not None and wait_ms is not None:
        raise ConfigError(f"{where} has the policy '{policy}', which learns how long to wait; leave out max_wait_ms")
    max_size = overrides.max_batch_size or settings.max_batch_size
    # Whoever streams joins those that do, so nobody waits for company; and streams that share their steps are apart.
    alone: Idle = "go" if settings.streams else "gather"
    is_mixed = settings.steps and bool(settings.methods)
    return BatchConfig(
        max_size=1 if settings.steps and not is_mixed else max_size,
        max_wait_s=(wait_ms or 0.0) / 1000,
        capacity=overrides.max_queue or settings.max_queue,
        idle=overrides.idle or (alone if wait_ms is None else "wait"),
        objective_s=None if objective_ms is None else objective_ms / 1000,
        size_of=(lambda key: max_size if isinstance(key, MethodKey) else 1) if is_mixed else None,
    )


def times_of(where: str, said_ms: int | None, own_ms: int, max_ms: int) -> tuple[float, float]:
    """Return the seconds that a request has if it names none itself, and the longest that it may ask for.

    Args:
        own_ms: What it says itself; what is everybody's counts as not said, and is no more than the longest.

    Raises:
        ConfigError: If requests would have more time than they may ask for.
    """
    if said_ms is None and own_ms == Model.timeout_ms:
        own_ms = min(own_ms, max_ms)
    timeout_ms = own_ms if said_ms is None else said_ms
    if timeout_ms > max_ms:
        raise ConfigError(
            f"{where}: timeout_ms is {timeout_ms}, more than max_timeout_ms, which is {max_ms}; "
            "raise that as well, or give requests less"
        )
    return timeout_ms / 1000, max_ms / 1000


def stream_idle_of(settings: ModelSettings, overrides: Overrides) -> float:
    """Return the longest pause between two parts of an answer, in seconds; 0 if there is no limit."""
    said_ms = overrides.stream_idle_ms
    return (settings.stream_idle_ms if said_ms is None else said_ms) / 1000


def seats_of(settings: ModelSettings, overrides: Overrides) -> int:
    """Return how many streams may be open in a worker of a model; 0 if it has none."""
    streams = settings.streams or any(method.streams for method in settings.methods)
    return (overrides.max_batch_size or settings.max_batch_size) if streams else 0


def single_flight_of(where: str, settings: ModelSettings, overrides: Overrides) -> Sharing:
    """Return which equal requests run once.

    Raises:
        ConfigError: If they are not equal to the model, or their answers come in parts.
    """
    sharing = overrides.single_flight or settings.single_flight
    if sharing == "off":
        return sharing
    names = [(f"method '{method.name}'", method) for method in settings.methods]
    for name, one in (("predict", settings), *names):
        if one.has_context or one.streams:
            does = "streams" if one.streams else "takes the context of each request"
            raise ConfigError(
                f"{where}: single_flight is '{sharing}' and its {name} {does}, so equal requests cannot share an "
                "answer; leave single_flight off"
            )
    return sharing


def isolates(where: str, settings: ModelSettings, overrides: Overrides) -> bool:
    """Tell whether batches that fail are run again in parts.

    Raises:
        ConfigError: If the person wants that of a model that streams.
    """
    wanted = settings.isolate_errors if overrides.isolate_errors is None else overrides.isolate_errors
    if wanted and settings.streams:
        raise ConfigError(f"{where} streams, and a stream that has begun cannot run again; leave out --isolate-errors")
    return wanted
