# SPDX-License-Identifier: Apache-2.0
"""Projects written for ventu: schemas, four hooks and one object that serves them, as HTTP or as a batching worker.

    from forebay.surfaces.ventu import Ventu

`forebay serve file.py` takes files that import it, under this name or the original's, and batches for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.surfaces.ventu.model import Ventu

__all__ = ["Ventu"]


def __getattr__(name: str) -> Any:
    # Not imported above: the surface reads files without pydantic, which only the class needs.
    if name != "Ventu":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from forebay.surfaces.ventu.model import Ventu
    except ModuleNotFoundError as error:
        if error.name != "pydantic":
            raise
        from forebay.errors import ConfigError

        msg = "Ventu needs pydantic, which is not installed here; install it with: pip install forebay[pydantic]"
        raise ConfigError(msg) from error
    return Ventu
