# SPDX-License-Identifier: Apache-2.0
"""Arrays of samples are cut alike in every format and at every length."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import TooLarge
from forebay.protocols import samples
from forebay.protocols.samples import samples_in_steps, samples_of
from forebay.types import json_segments
from forebay.types.element_limits import at_once

FORMATS = {"json": msgspec.json.encode, "msgpack": msgspec.msgpack.encode}


@pytest.mark.parametrize("name", FORMATS)
@given(count=st.integers(1, 40), limit=st.integers(1, 40))
def test_an_array_of_more_samples_than_wanted_is_too_large_however_its_length_is_written(name, count, limit):
    write = FORMATS[name]
    body = write(list(range(count)))
    if count > limit:
        with pytest.raises(TooLarge, match=f"more than {limit} samples"):
            samples_of(body, {"in": name}, limit)
    else:
        assert [bytes(one) for one in samples_of(body, {"in": name}, limit)] == [write(n) for n in range(count)]


@pytest.mark.parametrize("name", FORMATS)
def test_so_it_is_where_a_long_body_is_read_in_steps(name, monkeypatch):
    for module in (samples, json_segments):
        monkeypatch.setattr(module, "LONG_BYTES", 0)
    body = FORMATS[name]([1, [2, 3], 4])
    assert len(at_once(samples_in_steps(body, {"in": name}, 3, 6))) == 3
    with pytest.raises(TooLarge, match="more than 2 samples"):
        at_once(samples_in_steps(body, {"in": name}, 2, 6))


def test_values_in_samples_of_msgpack_are_counted_as_they_are_found(monkeypatch):
    monkeypatch.setattr(samples, "LONG_BYTES", 0)
    with pytest.raises(TooLarge, match="expected at most 4 elements"):
        at_once(samples_in_steps(msgspec.msgpack.encode([1, [2, 3], 4]), {"in": "msgpack"}, 3, 4))
