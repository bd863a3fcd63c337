# SPDX-License-Identifier: Apache-2.0
"""Samples that are dataclasses have every field, also those that a request left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, NamedTuple, NotRequired, TypedDict, TypeVar

import msgspec
import pytest

from forebay.serving.models.schema import WireType

T = TypeVar("T")


@dataclass
class Options:
    size: int
    mode: str = "fast"
    tags: list[str] = field(default_factory=list)
    more: Options | None = None


@dataclass(frozen=True)
class Box(Generic[T]):
    held: T
    count: int = 3


@dataclass(slots=True)
class Slotted:
    size: int
    mode: str = "fast"


class Around(msgspec.Struct):
    first: Options
    others: list[Options | int] = []


class Typed(TypedDict):
    options: NotRequired[Options]


class Named(NamedTuple):
    options: Options
    number: int = 2


SENT = {"size": 1}
WHOLE = {"size": 1, "mode": "fast", "tags": [], "more": None}


@pytest.mark.parametrize("format", ["json", "msgpack", "converted"])
@pytest.mark.parametrize(
    "annotation, sent, expected",
    [
        (Options, SENT, WHOLE),
        (Options, {"size": 1, "mode": "slow"}, {**WHOLE, "mode": "slow"}),
        (Options, {**SENT, "more": SENT}, {**WHOLE, "more": WHOLE}),
        (Slotted, SENT, {"size": 1, "mode": "fast"}),
        (Box[int], {"held": 1}, {"held": 1, "count": 3}),
        (Box[Options], {"held": SENT}, {"held": WHOLE, "count": 3}),
        (Around, {"first": SENT, "others": [1, SENT]}, {"first": WHOLE, "others": [1, WHOLE]}),
        (Typed, {"options": SENT}, {"options": WHOLE}),
        (Typed, {}, {}),
        (Named, [SENT], [WHOLE, 2]),
        (tuple[int, Options], [1, SENT], [1, WHOLE]),
        (tuple[Options, ...], [SENT], [WHOLE]),
        (Sequence[Options], [SENT], [WHOLE]),
        (frozenset[Box[int]], [{"held": 1}], [{"held": 1, "count": 3}]),
        (dict[str, Options], {"a": SENT}, {"a": WHOLE}),
        (Options | list[Options] | None, [SENT], [WHOLE]),
        (Options | list[Options] | None, None, None),
        (Annotated[Options, msgspec.Meta(title="options")], SENT, WHOLE),
    ],
)
def test_a_field_that_was_left_out_is_sent_back(annotation: Any, sent: Any, expected: Any, format: str):
    wire = WireType(annotation)
    if format == "converted":
        sample = wire.converter()(sent)
    else:
        sample = wire.decoder(format)(getattr(msgspec, format).encode(sent))
    assert msgspec.json.decode(WireType(annotation, "output").encoder("json")(sample)) == expected


@pytest.mark.parametrize("annotation", [Slotted, list[float]])
def test_what_has_no_such_dataclass_is_read_by_msgspec_alone(annotation: Any):
    assert isinstance(getattr(WireType(annotation).decoder("json"), "__self__", None), msgspec.json.Decoder)
