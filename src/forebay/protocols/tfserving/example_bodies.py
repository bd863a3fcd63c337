# SPDX-License-Identifier: Apache-2.0
"""What `classify` and `regress` are asked in JSON: examples, and the context that they share."""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

from forebay.errors import InvalidRequest, TooLarge
from forebay.protocols.samples import MAX_SAMPLES
from forebay.protocols.tfserving.examples import Example, with_context
from forebay.protocols.tfserving.json_tensors import no_base64, no_bytes, unpacked
from forebay.protocols.tfserving.odd_numbers import NUMBERS, with_marks
from forebay.types.element_limits import Steps, at_once
from forebay.types.first_use import known
from forebay.types.json_elements import json_elements
from forebay.types.json_segments import elements

MAX_FEATURES: Final = 200_000
"""Features of all examples of a request together."""
MAX_VALUES: Final = 400_000
"""Elements of the arrays of examples; the loop makes objects of them."""

_AS_THEY_ARE: Final = frozenset({int, float, bool})


class _Examples(msgspec.Struct, frozen=True):
    examples: list[dict[str, Any]]
    context: dict[str, Any] = {}
    signature_name: str = ""


class _Uncut(msgspec.Struct, frozen=True):
    examples: msgspec.Raw


_examples: Final = msgspec.json.Decoder(known(_Examples))
_uncut: Final = msgspec.json.Decoder(known(_Uncut))


def counting_examples(body: bytes | memoryview) -> Steps[None]:
    """Count the elements of examples: all of them become Python objects here; raises TooLarge if there are too many."""
    return json_elements(body, MAX_VALUES, 3 * MAX_FEATURES, "the request")


def decode_examples(body: bytes | memoryview) -> tuple[list[Example], str]:
    """Return the examples of a body, and the signature that is named.

    Raises:
        InvalidRequest: If that is not what the body holds.
        TooLarge: If it holds too many.
    """
    at_once(counting_examples(body))
    found = _decoded(bytes(body))
    if len(found.context) + sum(map(len, found.examples)) > MAX_FEATURES:
        raise TooLarge(f"the examples have more than {MAX_FEATURES} features together; send fewer at a time")
    shared = {name: _feature(value) for name, value in found.context.items()}
    rows = [{name: _feature(value) for name, value in one.items()} for one in found.examples]
    return with_context(cast("Example", shared), cast("list[Example]", rows)), found.signature_name


def _decoded(body: bytes, *, is_odd: bool = False) -> _Examples:
    try:
        # They are counted before anything is made of them.
        if body.count(b"{") > MAX_SAMPLES and at_once(elements(_uncut.decode(body).examples, MAX_SAMPLES)) is None:
            raise TooLarge(f"there are more than {MAX_SAMPLES} examples; send fewer at a time")
        return _examples.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        marked = None if is_odd else at_once(with_marks(body))
        if marked is None:
            raise InvalidRequest(f'body: expected {{"examples": [{{"feature": value, ...}}, ...]}}: {error}') from None
    return _decoded(marked, is_odd=True)


def _feature(value: Any) -> list[Any]:
    values = cast("list[Any]", value) if isinstance(value, list) else [value]
    values = [NUMBERS.get(one, one) if type(one) is str else one for one in values]
    if _AS_THEY_ARE.issuperset(map(type, values)):
        return values
    read = [_bytes(cast("dict[str, Any]", one)) if isinstance(one, dict) else one for one in values]
    return [one.encode() if isinstance(one, str) else one for one in read]


def _bytes(fields: dict[str, Any]) -> bytes:
    if fields.keys() != {"b64"}:
        raise no_bytes("of an example", "another object came")
    try:
        return unpacked(str(fields["b64"]))
    except ValueError as error:
        raise no_base64("of an example", error) from None
