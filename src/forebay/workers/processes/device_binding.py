# SPDX-License-Identifier: Apache-2.0
"""How a worker is tied to its device (environment of a process, processors of a thread); what devices exist."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from forebay.errors import ConfigError
from forebay.types.devices import NVIDIA, Device, read_devices
from forebay.workers.processes.cores import allowed_cores

VARIABLE: Final = "FOREBAY_DEVICE"
"""Tells a worker process what its libraries call its device."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Libraries read these when they are loaded; what a person has set stays."""


def environment_on(device: Device, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that runs on a device.

    Args:
        environment: That of a process on any device.

    Raises:
        ConfigError: If that hides the device.
    """
    found = {**environment, VARIABLE: device.name_alone}
    if device.kind in NVIDIA:
        visible = _visible(environment)
        if visible is not None and device.index >= len(visible):
            msg = f"a worker on {device} is given an environment where {VISIBLE} is {environment[VISIBLE]!r}"
            raise ConfigError(msg)
        found[VISIBLE] = str(device.index) if visible is None else visible[device.index]
    for name in _THREADS if device.cores else ():
        found.setdefault(name, str(len(device.cores)))
    return found


def device_in(environment: Mapping[str, str]) -> str:
    """Return what libraries call the device of this process."""
    return environment.get(VARIABLE) or "cpu"


def run_on(cores: Sequence[int]) -> None:
    """Tie this thread, and those that it will start, to some processors; none leaves it as it is."""
    tie: Callable[[int, Sequence[int]], None] | None = getattr(os, "sched_setaffinity", None)
    if cores and tie is not None:
        tie(0, cores)


def existing(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the devices that are meant, each as it is written.

    Raises:
        ValueError: With what is allowed, if one is misspelt or surely not there.
    """
    devices = read_devices(texts)
    here = allowed_cores()
    for device in devices:
        if device.cores and not hasattr(os, "sched_setaffinity"):
            raise ValueError(f"expected no processors, got {device}; only Linux ties workers to some: leave them out")
        if missing := sorted(set(device.cores) - here):
            raise ValueError(f"expected CPUs that this process may use ({spelled(here)}), got {spelled(missing)}")
        count = _count(os.environ)
        if device.kind in NVIDIA and count is not None and device.index >= count:
            why = f"{VISIBLE} is {os.environ[VISIBLE]!r}" if VISIBLE in os.environ else f"there are {count}"
            most = f"{device.kind}:0 to {device.kind}:{count - 1}" if count > 1 else f"{device.kind}:0"
            raise ValueError(f"expected {most if count else 'cpu'}, got {device}; {why}")
    return tuple(map(str, devices))


def existing_one(text: str) -> str:
    """Return a device as it is written.

    Raises:
        ValueError: With what is allowed, if it is misspelt or surely not there, or if there are several.
    """
    found = existing([text])
    if len(found) != 1:
        raise ValueError(f"expected one device, got {len(found)}")
    return found[0]


def move_to(text: str) -> None:
    """Put this process on a device, before it imports what runs there."""
    (device,) = read_devices([text])
    os.environ.update(environment_on(device, os.environ))
    run_on(device.cores)


def doubtful(devices: Sequence[Device]) -> str:
    """Return why devices may be missing; empty if there is no reason to doubt them."""
    told = [str(device) for device in devices if device.kind in NVIDIA]
    if not told or _count(os.environ) is not None:
        return ""
    return f"{', '.join(told)}: no NVIDIA device is seen here (no /dev/nvidia0); whether a model finds it is left to it"


def spelled(cores: Sequence[int] | set[int]) -> str:
    """Return processors as a person writes them: `cpu:0-3,6`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return "cpu:" + ",".join("-".join(map(str, run)) for run in runs)


def _count(environment: Mapping[str, str]) -> int | None:
    """Return how many NVIDIA devices there are; None if that cannot be told."""
    visible = _visible(environment)
    if visible is not None:
        return len(visible)
    return len([one for one in Path("/dev").glob("nvidia[0-9]*") if one.name[6:].isdecimal()]) or None


def _visible(environment: Mapping[str, str]) -> list[str] | None:
    """Return the devices that this process was left, by the numbers that it gives them; None for all."""
    if VISIBLE not in environment:
        return None
    told = [one.strip() for one in environment[VISIBLE].split(",")]
    return told[: next((at for at, one in enumerate(told) if one in {"", "-1"}), len(told))]
