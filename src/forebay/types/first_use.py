# SPDX-License-Identifier: Apache-2.0
"""Types that threads may hand to msgspec: each is used for the first time by one of them.

msgspec (0.22) gathers what it needs to know of a class when it first meets it, and hangs that on the class before it is
whole: a second thread that meets the class meanwhile ends the process with a segmentation fault.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

_gathering: Final = threading.RLock()  # annotations are evaluated below it, and may lead here again


def known(kind: T) -> T:
    """Return the type once msgspec knows it and all that it is made of.

    It costs some microseconds each time: what is read often has a decoder of its own, or a type that was made known.

    Raises:
        Exception: What msgspec raises of a type that it cannot read, or its annotations as they are evaluated.
    """
    form: Any = kind
    with _gathering:
        msgspec.msgpack.Decoder(form)
    return kind
