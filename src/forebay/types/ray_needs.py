# SPDX-License-Identifier: Apache-2.0
"""What a worker reserves on a node of a Ray cluster, as a person writes it; Ray itself is not needed for that."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from forebay.types.settings import Checked


def _environment(given: dict[str, Any]) -> dict[str, Any]:
    """Return a `runtime_env` of Ray; raises a `ValueError` if something of it would end with Ray."""
    for name in given:
        if name != "env_vars":
            hint = {"working_dir": "forebay copies the folder of the project to each node"}.get(
                name, "Ray removes its environments when it stops; name an interpreter of each node: python: PATH"
            )
            raise ValueError(f"expected env_vars only, got {name}; {hint}")
    return given


class RayNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What each worker of a model reserves on a node of a Ray cluster.

    Attributes:
        num_cpus: Processors.
        num_gpus: GPUs; the worker sees no others. A part of one is shared.
        memory: Bytes.
        resources: Resources that were named when nodes were started.
        labels: Labels that the node must have.
        placement: Whether workers go to many nodes or to few.
        runtime_env: Variables of the environment (`env_vars`); nothing that Ray would have to install.
    """

    num_cpus: Annotated[float, Meta(ge=0)] = 1.0
    num_gpus: Annotated[float, Meta(ge=0)] = 0.0
    memory: Annotated[int, Meta(ge=0)] = 0
    resources: dict[str, Annotated[float, Meta(gt=0)]] = {}
    labels: dict[str, str] = {}
    placement: Literal["spread", "pack"] = "spread"
    runtime_env: Annotated[dict[str, Any], Checked(_environment)] = {}

    @property
    def amounts(self) -> dict[str, float]:
        """The amounts by the names that Ray has for them."""
        usual = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": float(self.memory)}
        return {name: amount for name, amount in {**usual, **self.resources}.items() if amount}
