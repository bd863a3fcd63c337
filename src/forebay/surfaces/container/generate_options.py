# SPDX-License-Identifier: Apache-2.0
"""What a person may say of the files that are written for a project."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

WireTls: TypeAlias = Literal["secret", "cert-manager", "none"]
"""Who makes the certificates that fronts, owners and workers show each other."""


class SplitFlags(NamedTuple):
    """Flags of `forebay serve` and `forebay worker` in a split deployment, by who gets them; and its certificates."""

    fronts: Sequence[str] = ()
    owners: Sequence[str] = ()
    workers: Sequence[str] = ()
    tls: WireTls = "secret"


class Wanted(NamedTuple):
    """What a person may say of the files.

    Attributes:
        output: The folder that they go to.
        image: What the image is called, with its tag.
        replicas: How many pods there are at least.
        secrets: Files of keys, which no image may have.
        keys_file: The file with the keys without a name, which may still be missing.
        split: How fronts, owners and workers are started as pods of their own; None puts all into each pod.
        has_ray: Whether pods are nodes of a cluster of Ray.
        is_kubernetes_only: Whether only the image and the Kubernetes manifests are written.
        environments: Virtual environments in the project's folder, which no image should have.
    """

    output: Path
    image: str
    replicas: int
    secrets: Sequence[str]
    keys_file: Path
    split: SplitFlags | None = None
    has_ray: bool = False
    is_kubernetes_only: bool = False
    environments: Sequence[str] = ()
