# SPDX-License-Identifier: Apache-2.0
"""The names handlers import from the original: offered by an import hook, in processes forebay starts.

    cortex_internal.lib.log          logger, configure_logger
    cortex_internal.lib.exceptions   CortexException, UserException, UserRuntimeException

Nothing of this lies on the disk under those names. A script of one's own asks for them with

    from forebay.surfaces.nucleus import shim
    shim.install()

before it imports them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from forebay.surfaces.nucleus import environment, logs
from forebay.surfaces.offered_modules import Modules, offer


class CortexException(Exception):
    """A failure told in parts, the outermost first."""

    def __init__(self, *messages: str) -> None:
        super().__init__(": ".join(messages))
        self.errors = deque(messages)

    def wrap(self, *messages: str) -> None:
        """Put parts in front."""
        self.errors.extendleft(reversed(messages))

    def stringify(self) -> str:
        """Return the text: `error:` and the parts."""
        return "error: " + ": ".join(self.errors)

    def __str__(self) -> str:
        return self.stringify()

    def __repr__(self) -> str:
        return self.stringify()

    def __reduce__(self) -> Any:
        # Calling the class with the parts again would add to them in classes below.
        return _revive, (type(self), tuple(self.errors))


class UserException(CortexException):
    """The caller, or the project, is at fault."""


class UserRuntimeException(UserException):
    """The project's code failed at run time."""

    def __init__(self, *messages: str) -> None:
        super().__init__(*messages, "runtime exception")


_EXCEPTIONS = (CortexException, UserException, UserRuntimeException)
for _class in _EXCEPTIONS:
    _class.__module__ = "cortex_internal.lib.exceptions"

_MODULES: Final[Modules] = {
    "cortex_internal": {},
    "cortex_internal.lib": {},
    "cortex_internal.lib.log": dict.fromkeys(("logger", "configure_logger"), logs.__name__),
    "cortex_internal.lib.exceptions": {each.__name__: __name__ for each in _EXCEPTIONS},
}


def install(log_level: str | None = None) -> None:
    """Offer the names in this process, complete its environment and let the logger write.

    Args:
        log_level: debug, info, warning or error; None takes what this worker was started with, or CORTEX_LOG_LEVEL.
    """
    level = environment.settle()
    logs.configure_logger(level=log_level or level)
    offer(_MODULES)


def _revive(cls: type[CortexException], messages: Sequence[str]) -> CortexException:
    error = cls.__new__(cls, *messages)
    CortexException.__init__(error, *messages)
    return error
