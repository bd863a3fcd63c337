# SPDX-License-Identifier: Apache-2.0
"""What kind of function something of the user's is, also behind decorators that say what they wrap.

`functools.wraps` says so. Such a decorator, if it is a plain function itself, returns what it was given as a rule: then
what it wraps counts. Where it has waited for a coroutine itself, what comes back counts, which is looked at later.
"""

from __future__ import annotations

import inspect
from typing import Any


def generates(function: Any) -> bool:
    """Tell whether it is a generator function, or an async one."""
    return _generates(inspect.unwrap(function, stop=_has_kind))


def may_await(function: Any) -> bool:
    """Tell whether there may be something to wait for in what it returns."""
    return awaits(inspect.unwrap(function, stop=_has_kind))


def awaits(function: Any) -> bool:
    """Tell whether it is a coroutine function or an async generator function itself, without a look behind it."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _generates(function: Any) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _has_kind(function: Any) -> bool:
    return awaits(function) or _generates(function)
