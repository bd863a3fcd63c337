# SPDX-License-Identifier: Apache-2.0
"""forebay turns models that are Python objects into production endpoints.

Names are imported on first use: `import forebay` itself loads only the standard library and msgspec.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.errors import (
        ConfigError,
        DeadlineExceeded,
        ForebayError,
        InvalidRequest,
        NotFound,
        QueueFull,
        RequestError,
        Unavailable,
        ValidationError,
    )
    from forebay.serving.model import Model
    from forebay.types.call import Failure
    from forebay.workers.cancel import is_cancelled

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "forebay.errors",
    "DeadlineExceeded": "forebay.errors",
    "Failure": "forebay.types.call",
    "ForebayError": "forebay.errors",
    "InvalidRequest": "forebay.errors",
    "Model": "forebay.serving.model",
    "NotFound": "forebay.errors",
    "QueueFull": "forebay.errors",
    "RequestError": "forebay.errors",
    "Unavailable": "forebay.errors",
    "ValidationError": "forebay.errors",
    "is_cancelled": "forebay.workers.cancel",
}

__all__ = [
    "ConfigError",
    "DeadlineExceeded",
    "Failure",
    "ForebayError",
    "InvalidRequest",
    "Model",
    "NotFound",
    "QueueFull",
    "RequestError",
    "Unavailable",
    "ValidationError",
    "is_cancelled",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        msg = f"module 'forebay' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
