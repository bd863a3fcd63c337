# SPDX-License-Identifier: Apache-2.0
"""What a worker runs on: an accelerator, or the processors of this machine; as a person writes it. Nothing is asked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from forebay.types.did_you_mean import nearest

NVIDIA: Final = ("cuda", "tensorrt")
"""Kinds that `CUDA_VISIBLE_DEVICES` numbers."""
KINDS: Final = ("cpu", "cuda", "gpu", "npu", "tensorrt", "xpu")
ALLOWED: Final = "such as cpu, cpu:0-3, cpu:0,2, cuda:0, gpu:0, npu, tensorrt:0 or xpu:0"

_WRITTEN: Final = re.compile(r"([a-z]+)(?::([0-9]{1,4}))?")
_CORES: Final = re.compile(r"cpu:([0-9]{1,4}(?:-[0-9]{1,4})?(?:,[0-9]{1,4}(?:-[0-9]{1,4})?)*)")


class Device(msgspec.Struct, frozen=True):
    """A device.

    Attributes:
        kind: One of `KINDS`, or what else a library may know.
        said: How the person calls it, for messages.
        cores: The processors of the machine that are meant, if it is some of them.
    """

    kind: str
    index: int = 0
    said: str = ""
    cores: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return what messages call it."""
        return self.said or self.name

    @property
    def name(self) -> str:
        """What libraries call it."""
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def name_alone(self) -> str:
        """What libraries call it in a process that sees no other one of its kind."""
        return f"{self.kind}:0" if self.kind in NVIDIA else self.name


def read_device(text: str) -> Device:
    """Read one device; raises a `ValueError` with what is allowed."""
    written = text.strip().lower()
    if (found := _CORES.fullmatch(written)) is not None:
        cores: set[int] = set()
        for piece in found[1].split(","):
            first, _, last = piece.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
        if cores:
            return Device("cpu", said=written, cores=tuple(sorted(cores)))
    found = _WRITTEN.fullmatch(written)
    if found is not None and found[1] in KINDS:
        return Device(found[1], int(found[2] or 0), written)
    meant = re.fullmatch(r"([a-z]*)[:.\-_ ]*([0-9]*)", written)
    kind = nearest(meant[1], KINDS) if meant is not None else None
    hint = f"; did you mean {kind}{':' if meant is not None and meant[2] else ''}{meant[2] if meant else ''}?"
    raise ValueError(f"expected a device {ALLOWED}, got {text!r}{hint if kind else ''}")


def written(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the devices of a list, each as it is written; raises a `ValueError` with what is allowed."""
    return tuple(map(str, read_devices(texts)))


def read_devices(texts: Iterable[str]) -> tuple[Device, ...]:
    """Read a list of devices, with commas between them or one by one: `cuda:0,cuda:1`, `cpu:0,2`.

    Raises:
        ValueError: With what is allowed.
    """
    pieces: list[str] = []
    for piece in ",".join(texts).split(","):
        if re.fullmatch(r"\s*[0-9-]+\s*", piece) and pieces and pieces[-1].startswith("cpu:"):
            pieces[-1] += f",{piece.strip()}"  # one more core of the same set
        elif pieces and piece.strip().isdecimal():
            meant = f"{pieces[-1].partition(':')[0]}:{piece.strip()}"
            raise ValueError(f"expected a device, got {piece.strip()!r}; did you mean {meant}?")
        elif piece.strip():
            pieces.append(piece.strip().lower())
    return tuple(map(read_device, pieces))
