# SPDX-License-Identifier: Apache-2.0
"""Libraries that take their room when a test uses them, not in every process that collects tests."""

from typing import Any

import pytest


class Later:
    """A module that is imported by its first use; the test that uses it is skipped where it is not installed."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name" or "pytest" in name or "fixture" in name:  # "is it a test?"
            raise AttributeError(name)
        return getattr(pytest.importorskip(self._name), name)


jax: Any = Later("jax")
jnp: Any = Later("jax.numpy")
torch: Any = Later("torch")
