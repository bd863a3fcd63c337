# SPDX-License-Identifier: Apache-2.0
"""Ray's library, which only its own actors and the deployer's child import."""

from __future__ import annotations

import importlib
from typing import Any

from forebay.errors import ConfigError


def ray_library() -> Any:
    """Return the module; raises a `ConfigError` if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"--cluster needs Ray ({error}): pip install 'forebay[ray]'") from error
