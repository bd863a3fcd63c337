# SPDX-License-Identifier: Apache-2.0
"""What may stand at a place of a sample, and that whoever sent something else is told."""

from typing import Literal

import msgspec
import pytest

from forebay.serving.models.decode_errors import explain
from forebay.serving.models.schema import WireType


class Leaf(msgspec.Struct, forbid_unknown_fields=True):
    kind: Literal["oak", "ash"]
    near: list["Leaf"] = []


class Tree(msgspec.Struct, forbid_unknown_fields=True):
    leaves: list[Leaf | None]
    pair: tuple[int, Leaf] | None = None
    named: dict[str, Leaf] = {}
    season: Literal["spring", "autumn"] | None = None


GIVEN = WireType(Tree, "input")


@pytest.mark.parametrize(
    "body, told",
    [
        ('{"leaves":[{"kind":"elm"}]}', "`ash`, `oak` are allowed"),
        ('{"leaves":[{"kind":"oak","near":[{"kind":"elm"}]}]}', "`ash`, `oak` are allowed"),
        ('{"leaves":[],"pair":[1,{"kind":3}]}', ""),
        ('{"leaves":[],"pair":[1,{"kind":"elm"}]}', "`ash`, `oak` are allowed"),
        ('{"leaves":[],"named":{"a":{"kind":"elm"}}}', "`ash`, `oak` are allowed"),
        ('{"leaves":[],"season":"fall"}', "`autumn`, `spring` are allowed"),
        ('{"leaves":[{"kynd":"oak"}]}', "unknown field `kynd` - at `$.leaves[0]`; did you mean `kind`?"),
        ('{"leaves":[],"zzz":1}', "unknown field `zzz`; `leaves`, `pair`, `named`, `season` are allowed"),
        # `named` is a field as well, and of another object.
        ('{"leaves":[{"names":1}]}', "`kind`, `near` are allowed"),
    ],
)
def test_what_is_possible_is_told(body, told):
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.json.decode(body, type=Tree)
    message = explain(error.value, body.encode(), GIVEN).message
    assert told in message
    assert told or "possible" not in message
