# SPDX-License-Identifier: Apache-2.0
"""A typed model with nothing in it that can fail: whatever goes wrong is the server's fault."""

from typing import Annotated

import msgspec

import forebay


class Leaf(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a sample."""

    weight: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
    label: Annotated[str, msgspec.Meta(max_length=20)] = ""


class Tree(msgspec.Struct, forbid_unknown_fields=True):
    """A sample."""

    name: str
    leaves: list[Leaf]
    depth: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0


class Grown(msgspec.Struct):
    """An answer."""

    name: str
    total: float


class Weigh(forebay.Model):
    """Adds up the weights of the leaves."""

    def predict(self, batch: list[Tree]) -> list[Grown]:
        return [Grown(tree.name, sum(leaf.weight for leaf in tree.leaves)) for tree in batch]
