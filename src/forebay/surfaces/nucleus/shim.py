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

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from forebay.surfaces.nucleus import environment, logs


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

_NAMES: Mapping[str, Mapping[str, Any]] = {
    "cortex_internal": {},
    "cortex_internal.lib": {},
    "cortex_internal.lib.log": {"logger": logs.logger, "configure_logger": logs.configure_logger},
    "cortex_internal.lib.exceptions": {each.__name__: each for each in _EXCEPTIONS},
}


def install(log_level: str | None = None) -> None:
    """Offer the names in this process, complete its environment and let the logger write.

    Args:
        log_level: debug, info, warning or error; None takes what this worker was started with, or CORTEX_LOG_LEVEL.
    """
    level = environment.settle()
    logs.configure_logger(level=log_level or level)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    """Finds and fills the modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        names = _NAMES.get(fullname)
        return None if names is None else ModuleSpec(fullname, self, origin="forebay", is_package=not names)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Names of the original, offered by forebay."
        vars(module).update(_NAMES[module.__name__])


def _revive(cls: type[CortexException], messages: Sequence[str]) -> CortexException:
    error = cls.__new__(cls, *messages)
    CortexException.__init__(error, *messages)
    return error
