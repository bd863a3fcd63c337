# SPDX-License-Identifier: Apache-2.0
"""Annotations to codecs: what each type reads and writes, and what is said of what cannot be read."""

import dataclasses
import datetime as dt
import enum
import json
import math
import sys
import tracemalloc
import types
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar
from urllib.parse import parse_qsl, urlencode

import annotated_types
import msgspec
import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.serving.models.annotations import io_types
from forebay.serving.models.decode_errors import explain
from forebay.serving.models.named import named
from forebay.serving.models.schema import WireType, plain
from forebay.types.call import FIELDS, Media
from forebay.types.file import File, FormPart
from forebay.types.model_answer import checked_headers

FORMATS = ["json", "msgpack"]
PACK = {"json": msgspec.json.encode, "msgpack": msgspec.msgpack.encode}
UNPACK = {"json": msgspec.json.decode, "msgpack": msgspec.msgpack.decode}
TEMPLATE = "#/components/schemas/{name}"

T = TypeVar("T")


class Point(msgspec.Struct):
    x: int
    y: float = 0.0


class Rows(msgspec.Struct):
    rows: list[Point]


class Tree(msgspec.Struct):
    children: "list[Tree]" = []


@dataclasses.dataclass
class Plain:
    a: str


class Typed(TypedDict):
    a: int


class Named(NamedTuple):
    a: int
    b: str


class Colour(enum.Enum):
    RED = "red"


class Cat(msgspec.Struct, tag=True):
    lives: int


class Dog(msgspec.Struct, tag=True):
    name: str


class Fish(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)
    kind: str
    fins: int = pydantic.Field(default=2, alias="finCount", ge=0)


class Shoal(pydantic.BaseModel):
    fish: list[Fish]
    parts: "list[Shoal]" = []


class Catch(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    at: dt.datetime
    place: tuple[float, float]
    colour: Colour
    count: int = 0
    weight: float = 0.0


class Blob(pydantic.BaseModel):
    data: Annotated[bytes, pydantic.Strict()]


NOON = dt.datetime(2026, 5, 1, 12, tzinfo=dt.UTC)


def fault(wire, body, format="json"):
    with pytest.raises(Exception) as caught:
        wire.decoder(format)(body)
    return explain(caught.value, body)


# ---------------------------------------------------------------------------------------------------------------------
# What each type reads and writes


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "annotation,sent,expected",
    [
        (Any, {"a": [1, None]}, {"a": [1, None]}),
        (object, [1, "a"], [1, "a"]),
        (Point, {"x": 1}, Point(1)),
        (list[Point], [{"x": 1, "y": 2.5}], [Point(1, 2.5)]),
        (Plain, {"a": "b"}, Plain("b")),
        (Typed, {"a": 1}, {"a": 1}),
        (Named, [1, "b"], Named(1, "b")),
        (Colour, "red", Colour.RED),
        (Cat | Dog, {"type": "Dog", "name": "Rex"}, Dog("Rex")),
        (int | None, None, None),
        (Annotated[int, msgspec.Meta(ge=0)], 3, 3),
        (Literal["a", "b"], "b", "b"),
        (tuple[int, str], [1, "a"], (1, "a")),
        (dict[str, list[float]], {"a": [1.5]}, {"a": [1.5]}),
        (Fish, {"kind": "eel", "finCount": 0}, Fish(kind="eel", finCount=0)),
        (list[Fish] | None, [{"kind": "eel"}], [Fish(kind="eel")]),
        (Annotated[int, pydantic.Field(gt=1)], 2, 2),
        (Annotated[int, annotated_types.Gt(1)], 2, 2),
        (
            Catch,
            {"at": "2026-05-01T12:00:00Z", "place": [1, 2.5], "colour": "red"},
            Catch(at=NOON, place=(1.0, 2.5), colour=Colour.RED),
        ),
    ],
)
def test_reads(annotation, sent, expected, format):
    body = PACK[format](sent)
    decode = WireType(annotation).decoder(format)
    for buffer in (body, bytearray(body), memoryview(body)):
        assert decode(buffer) == expected


def test_strict_types_of_pydantic_get_what_they_do_not_get_of_json():
    read = WireType(Catch).decoder("msgpack")
    sent = {"at": "2026-05-01T12:00:00Z", "place": [1, 2], "colour": "red", "weight": math.inf}
    assert read(PACK["msgpack"](sent)).weight == math.inf
    for each in FORMATS:
        found = fault(WireType(Catch), PACK[each]({**sent, "weight": 0, "count": "3"}), each)
        assert (found.kind, found.path) == ("invalid", "$.count")
    assert WireType(Blob).decoder("msgpack")(PACK["msgpack"]({"data": b"\xff"})) == Blob(data=b"\xff")


def test_strict_types_of_pydantic_read_the_texts_of_forms_and_queries():
    sent = b"at=2026-05-01T12:00:00Z&place=1&place=2.5&colour=red&count=3"
    expected = Catch(at=NOON, place=(1.0, 2.5), colour=Colour.RED, count=3)
    assert WireType(Catch).decoder("query")(sent) == expected
    parts = [FormPart(name, value.encode()) for name, value in parse_qsl(sent.decode())]
    assert WireType(Catch).decoder("form")(named(parts)) == expected


class Boxed(msgspec.Struct):
    agree: bool = False
    maybe: bool | None = None
    text: str | bool = ""


class BoxedModel(pydantic.BaseModel):
    agree: bool = False
    maybe: bool | None = None


def read_fields(annotation, format, **fields):
    """Read fields of a form, or parameters of a query."""
    parts = [FormPart(name, value.encode()) for name, value in fields.items()]
    return WireType(annotation).decoder(format)(named(parts) if format == "form" else urlencode(fields).encode())


@pytest.mark.parametrize("format", ["query", "form"])
@pytest.mark.parametrize("kind", [Boxed, BoxedModel])
def test_a_checkbox_is_a_boolean(kind, format):  # F117
    for text, value in [("on", True), ("off", False), ("Yes", True), ("no", False), ("true", True), ("0", False)]:
        assert read_fields(kind, format, agree=text, maybe=text) == kind(agree=value, maybe=value)
    assert read_fields(kind, format) == kind(agree=False)
    assert read_fields(Boxed, format, text="on").text == "on"
    with pytest.raises((msgspec.ValidationError, pydantic.ValidationError)):
        read_fields(kind, format, agree="onn")


class Settings(pydantic.BaseModel):
    weights: pydantic.Json[list[int]]
    any: pydantic.Json = None
    maybe: pydantic.Json[dict[str, int]] | None = None


class StrictSettings(pydantic.BaseModel, strict=True):
    weights: pydantic.Json[list[int]]


@pytest.mark.parametrize("format", ["query", "form"])
def test_a_field_of_json_is_read_by_pydantic(format):  # F115
    sent = {"weights": "[1, 2]", "any": '{"x": [1]}', "maybe": '{"a": 1}'}
    expected = Settings.model_validate(sent)
    assert expected.weights == [1, 2]
    assert read_fields(Settings, format, **sent) == expected
    assert read_fields(Settings, format, weights="[]", any="null", maybe="null") == Settings.model_validate(
        {"weights": "[]"}
    )
    assert read_fields(StrictSettings, format, weights="[3]").weights == [3]
    assert read_fields(pydantic.Json[list[int]], format, whatever="[4]") == [4]
    with pytest.raises(pydantic.ValidationError, match="weights"):
        read_fields(Settings, format, weights="[1")


def test_a_field_of_json_may_say_that_it_is_json():  # F115
    part = FormPart("weights", b"[1]", None, "application/json")
    assert WireType(Settings).decoder("form")(named([part])).weights == [1]
    for each in ("json", "msgpack"):
        assert WireType(Settings).decoder(each)(PACK[each]({"weights": "[1]"})).weights == [1]


@pytest.mark.parametrize("format", ["query", "form"])
def test_names_of_a_form_that_are_no_fields_are_ignored_however_often_they_come(format):
    sent = b"x=1&y=2&utm=a&utm=b"
    body = sent if format == "query" else named([FormPart(k, v.encode()) for k, v in parse_qsl(sent.decode())])
    assert WireType(Point).decoder(format)(body) == WireType(Point).decoder("json")(b'{"x":1,"y":2}')


def test_a_msgspec_type_is_read_by_the_c_decoder_itself():
    decode = WireType(Point).decoder("json")
    assert isinstance(decode, types.BuiltinMethodType)
    assert isinstance(decode.__self__, msgspec.json.Decoder)
    wire = WireType(Point)
    assert wire.decoder("msgpack") is wire.decoder("msgpack")


def test_bytes_pass_untouched():
    wire = WireType(bytes)
    assert wire.raw
    body = b"\xff\x00 not json"
    assert wire.decoder("json")(body) is body
    assert wire.decoder("msgpack")(memoryview(body)) == body
    out = WireType(bytes, "output")
    assert out.encoder("json")(body) is body
    assert out.encoder("json")(bytearray(body)) == body
    assert out.encoder("json")(memoryview(body)) == body


@pytest.mark.parametrize("value", [5, [1, 2], "text", None])
def test_bytes_output_takes_only_bytes(value):
    with pytest.raises(TypeError, match="annotated bytes"):
        WireType(bytes, "output").encoder("json")(value)


def test_raw_bytes_may_be_constrained():
    wire = WireType(Annotated[bytes, msgspec.Meta(max_length=3)])
    assert wire.raw
    assert wire.decoder("json")(memoryview(b"abc")) == b"abc"
    assert fault(wire, b"abcd").kind == "invalid"


def test_bytes_inside_a_type_are_not_raw():
    wire = WireType(list[bytes])
    assert not wire.raw
    assert wire.decoder("json")(b'["YQ=="]') == [b"a"]


def test_unknown_format():
    with pytest.raises(ValueError, match="'xml'"):
        WireType(int).decoder("xml")
    with pytest.raises(ValueError, match="'xml'"):
        WireType(int).encoder("xml")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "value,expected",
    [
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        ({"scores": np.array([0.5], dtype=np.float32)}, {"scores": [0.5]}),
        ([np.float64(1.5), np.float32(0.5), np.int64(3), np.bool_(True), np.str_("a")], [1.5, 0.5, 3, True, "a"]),
        (np.longdouble(1.5), 1.5),
        (np.array([np.longdouble(1.5)]), [1.5]),
        (np.array([{"a": np.int8(1)}], dtype=object), [{"a": 1}]),
        (Fish(kind="eel"), {"kind": "eel", "finCount": 2}),
        (Point(1), {"x": 1, "y": 0.0}),
    ],
)
def test_writes_arrays_and_models_whatever_the_annotation_says(value, expected, format):
    for annotation in (Any, int, list[Point]):
        assert UNPACK[format](WireType(annotation, "output").encoder(format)(value)) == expected


def test_nan_becomes_null_in_json_only():
    encode = WireType(Any, "output").encoder
    assert encode("json")([math.nan, math.inf]) == b"[null,null]"
    assert encode("json")(np.array([math.nan])) == b"[null]"
    assert math.isnan(msgspec.msgpack.decode(encode("msgpack")(math.nan)))


def test_what_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match="complex"):
        WireType(Any, "output").encoder("json")([1j])
    with pytest.raises(TypeError, match="complex"):
        plain(np.complex128(1j).item())


class Tensor:
    """As TensorFlow's: an array by protocol only."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


class Table(Tensor):
    columns = ("a", "b")


class Itself:
    def __array__(self, dtype=None, copy=None):
        found = np.empty((), object)
        found[()] = self
        return found


class Instant(dt.datetime):
    """As the times of pandas and pendulum, which are no plain ones."""


class NoInstant(Instant):
    """As NaT: of the type, and no time."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other):
        return False

    def date(self):
        raise ValueError("NaT has no date")


class Day(dt.date):
    pass


class Span(dt.timedelta):
    pass


class Word(str):
    __slots__ = ()

    def __str__(self):
        return "another"


class Count(int):
    pass


class Score(float):
    pass


UTC = dt.UTC
# What is missing in columns of pandas that are not of NumPy.
NA = type("NAType", (), {"__module__": "pandas.api.typing"})()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "value,base",
    [
        (Instant(2024, 1, 2, 3, 4, 5, 6), dt.datetime(2024, 1, 2, 3, 4, 5, 6)),  # noqa: DTZ001
        (Instant(2024, 1, 2, tzinfo=UTC), dt.datetime(2024, 1, 2, tzinfo=UTC)),
        (NoInstant(2024, 1, 2), None),
        (Day(2024, 1, 2), dt.date(2024, 1, 2)),
        (Span(days=-1, microseconds=7), dt.timedelta(days=-1, microseconds=7)),
        (Word("a"), "a"),
        (Count(-3), -3),
        (Score(0.5), 0.5),
        (NA, None),
        (Tensor([[1, 2]]), [[1, 2]]),
        (Tensor(0.5), 0.5),
    ],
)
def test_what_inherits_from_a_plain_type_or_is_an_array_by_protocol_is_sent(value, base, format):
    for around in (lambda one: one, lambda one: {"a": [one]}):
        encode = WireType(Any, "output").encoder(format)
        assert encode(around(value)) == encode(around(base))


def test_keys_may_inherit_from_texts_and_numbers():
    assert WireType(Any, "output").encoder("json")({Word("a"): 1, Count(2): 3}) == b'{"a":1,"2":3}'


@pytest.mark.parametrize("key,kind", [((1, 2), "tuple"), (None, "None"), (True, "bool")])
def test_a_key_that_cannot_be_sent_is_called_a_key(key, kind):
    with pytest.raises(TypeError, match=f"a dict with a key that is `{kind}`; only texts and numbers can be"):
        WireType(Any, "output").encoder("json")({key: 1})


@pytest.mark.parametrize("value", [Table([[1, 2]]), Itself()])
def test_a_table_would_lose_the_names_of_its_columns(value):
    told = "records" if isinstance(value, Table) else "arrays, or bytes as a forebay.Media"
    with pytest.raises(TypeError, match=f"{type(value).__name__}`, which cannot be sent; return .*{told}"):
        WireType(Any, "output").encoder("json")(value)


@pytest.mark.parametrize("format", FORMATS)
def test_a_pydantic_result_without_annotation_may_hold_arrays(format):
    class Loose(pydantic.BaseModel):
        values: Any

    class Own(pydantic.BaseModel):
        a: int

        def model_dump(self, *, mode, by_alias):  # pyright: ignore[reportIncompatibleMethodOverride]
            return {"b": self.a}

    encode = WireType(Any, "output").encoder(format)
    assert UNPACK[format](encode(Loose(values=np.arange(2)))) == {"values": [0, 1]}
    assert UNPACK[format](encode(Own(a=1))) == {"b": 1}
    with pytest.raises(Exception, match="a result holds `object`, which cannot be sent"):
        encode(Loose(values=[object()]))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="pydantic.v1 does not run there")
@pytest.mark.parametrize("direction", ["input", "output"])
def test_models_of_pydantic_v1_are_told_before_the_first_sample(direction):
    from pydantic import v1

    class Old(v1.BaseModel):
        size: int

    with pytest.raises(ConfigError, match=r"Old` is a model of pydantic\.v1"):
        WireType(dict[str, Old], direction)


@pytest.mark.parametrize("format", FORMATS)
def test_pydantic_output_by_alias_and_checked(format):
    encode = WireType(list[Fish], "output").encoder(format)
    assert UNPACK[format](encode([Fish(kind="eel")])) == [{"kind": "eel", "finCount": 2}]
    with pytest.raises(ValueError, match="Expected"):
        encode([{"kind": "eel"}])


@pytest.mark.parametrize("format", FORMATS)
def test_pydantic_output_may_hold_arrays(format):
    class Loose(pydantic.BaseModel):
        values: Any

    assert UNPACK[format](WireType(Loose, "output").encoder(format)(Loose(values=np.arange(2)))) == {"values": [0, 1]}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(value=json_values, format=st.sampled_from(FORMATS))
def test_round_trip_of_anything(value, format):
    wire = WireType(Any)
    assert wire.decoder(format)(wire.encoder(format)(value)) == value


points = st.builds(Point, st.integers(-(2**63), 2**63), st.floats(allow_nan=False, allow_infinity=False))
fish = st.builds(Fish, kind=st.text(), fins=st.integers(0, 2**62))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(points, max_size=5), shoal=st.lists(fish, max_size=5), format=st.sampled_from(FORMATS))
def test_round_trip_of_structs_and_models(rows, shoal, format):
    for annotation, value in ((Rows, Rows(rows)), (list[Fish], shoal)):
        body = WireType(annotation, "output").encoder(format)(value)
        assert WireType(annotation).decoder(format)(memoryview(body)) == value


ANY, FISH = WireType(Any), WireType(Fish)


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()[:-1]))
def test_no_body_is_beyond_explanation(body):
    for wire in (ANY, FISH):
        for each in FORMATS:
            try:
                wire.decoder(each)(body)
            except Exception as error:
                found = explain(error, body)
                assert found.kind in ("malformed", "invalid")
                assert found.position is None or 0 <= found.position <= len(body)


# ---------------------------------------------------------------------------------------------------------------------
# Explanations


@pytest.mark.parametrize("annotation", [Any, Rows, Fish], ids=str)
@pytest.mark.parametrize(
    "body,position",
    [
        (b"", 0),
        (b'{"rows": [', 10),
        (b'{"rows": [}', 10),
        (b'{"rows": [],\n"kind": "a"} x', 26),
        (b'{"rows": [],\n\n "kind": tru }', 26),
        (b'{"rows": [], "kind": "a\xffb"', 23),
        ('{"rows": [], "é": x}'.encode(), 19),
    ],
)
def test_malformed_json(annotation, body, position):
    if annotation is Rows and b"\xff" in body:
        pytest.skip("a field nobody asked for is skipped without a look at its characters")
    found = fault(WireType(annotation), body)
    assert found.kind == "malformed"
    assert f"byte {found.position}" in found.message or "The body is empty" in found.message
    # msgspec counts the bytes it has read, which may be one or two beyond or before the one it minds.
    assert found.position == pytest.approx(position, abs=0 if annotation is Fish or position < 20 else 2)
    assert found.path is None


def test_malformed_utf8_in_an_escaped_string():
    assert fault(ANY, b'["a\\n\xff"]').position == 5


def test_malformed_msgpack():
    for wire in (ANY, FISH):
        assert fault(wire, b"\xc1", "msgpack")[::3] == ("malformed", 0)
        assert fault(wire, b"\x92\x01", "msgpack")[::3] == ("malformed", 2)
        assert fault(wire, b"\x01\x01", "msgpack")[::3] == ("malformed", 1)
        assert fault(wire, b"\xa2a\xff", "msgpack")[::3] == ("malformed", 2)


@pytest.mark.parametrize("format", ["json", "msgpack"])
@pytest.mark.parametrize("annotation", [Any, Fish, Shoal], ids=str)
def test_an_empty_body_is_called_so(annotation, format):  # F57
    message = "The body is empty; a sample is the body, and not the query"  # F117
    assert fault(WireType(annotation), b"", format)[:4] == ("malformed", message, None, 0)


@pytest.mark.parametrize("annotation", [Any, Boxed, BoxedModel], ids=str)
@pytest.mark.parametrize(
    "body, hint",
    [
        (b'\xef\xbb\xbf{"a": 1}', "; it begins with a byte order mark, send UTF-8 without one"),
        ('{"a": 1}'.encode("utf-16"), "; it is in UTF-16, send UTF-8"),
        ('{"a": 1}'.encode("utf-16-be"), ""),
        (b'{"a": NaN}', "; JSON has no NaN, send null, or msgpack"),
        (b'{"a": [1, -Infinity]}', "; JSON has no -Infinity, send null, or msgpack"),
        (b'{"a": nan}', ""),
    ],
)
def test_what_json_has_not_and_others_write_is_named(annotation, body, hint):  # F117
    if annotation is BoxedModel and hint.startswith("; JSON"):
        assert WireType(BoxedModel).decoder("json")(b'{"agree": true, "other": NaN}') == BoxedModel(agree=True)
        return
    found = fault(WireType(annotation), body)
    assert found.kind == "malformed"
    assert found.message.endswith(hint or ")")


class Blobs(msgspec.Struct):
    data: bytes


@pytest.mark.parametrize("sent", ["AQI", "_-8=", "data:image/png;base64,AQI=", "AQ\nI="])
def test_base64_that_is_not_the_usual_is_told_which_is(sent):  # F117
    message = fault(WireType(Blobs), PACK["json"]({"data": sent})).message
    assert message.startswith("Invalid base64 encoded string - at `$.data`; use the alphabet with + and /")
    assert "`data:`" in message


def test_truncated_without_the_body_has_no_position():
    with pytest.raises(msgspec.DecodeError) as caught:
        ANY.decoder("json")(b"[")
    assert explain(caught.value) == ("malformed", "The body ends in the middle of a value", None, None, ())


@pytest.mark.parametrize("annotation", [Any, list[str]], ids=str)
@pytest.mark.parametrize(
    "before, behind",
    [(rb"\ud800", b""), (rb"\uDBFF", b"."), (rb"\\\ud800", b""), (rb"\ud83d", rb"\n"), (b" " * 100 + rb"\ud83d", b"")],
)
def test_half_a_character_near_the_end_is_no_end_of_the_body(annotation, before, behind):
    for body in (b'["%s%s"]' % (before, behind), memoryview(b'["%s%s"]' % (before, behind))):
        found = fault(WireType(annotation), body)
        end = 2 + len(before)
        assert found.message == f"JSON is malformed: unexpected end of escaped utf-16 surrogate pair (byte {end})"
        assert (found.kind, found.position) == ("malformed", end)


@pytest.mark.parametrize(
    "body",
    [
        rb'["\ud83d',
        rb'["\ud83d' + b"\\",
        rb'["\ud83d\u',
        rb'["\ud83d\ud83',
        rb'["\\ud83d.',
        rb'["ud83d.',
        rb'["\u0041.',
    ],
)
def test_a_body_that_was_cut_behind_half_a_character_ends_there(body):
    assert fault(ANY, body).message == f"The body ends in the middle of a value (byte {len(body)})"
    assert fault(ANY, msgspec.msgpack.encode(rb"\ud83d.")[:-1], "msgpack").message.startswith("The body ends")


@pytest.mark.parametrize("annotation", [Any, Tree, Fish, Shoal], ids=str)
def test_nesting_bombs_are_malformed(annotation):
    wire = WireType(annotation)
    json_bombs = [b'{"children":[' * 100_000, b'{"parts":[' * 100_000, b'{"x":' * 100_000, b'{"x":' + b"[" * 100_000]
    for bomb in json_bombs:
        assert fault(wire, bomb).kind == "malformed"
    assert fault(wire, b"\x81\xa1x" * 100_000, "msgpack").kind == "malformed"


def test_nesting_that_only_pydantic_minds_is_malformed():
    value = {"fish": []}
    for _ in range(300):
        value = {"fish": [], "parts": [value]}
    assert fault(WireType(Shoal), msgspec.msgpack.encode(value), "msgpack").kind == "malformed"


@pytest.mark.parametrize(
    "annotation,value,path,words",
    [
        (Rows, {"rows": [{"x": 1}, {"x": 2}, {"x": 3}, {"x": "a"}]}, "$.rows[3].x", "Expected `int`, got `str`"),
        (Rows, [], "$", "Expected `object`, got `array`"),
        (Rows, {}, "$.rows", "missing required field `rows`"),  # F56
        (list[Rows], [{"rows": []}, {}], "$[1].rows", "missing required field `rows`"),
        (Shoal, {"fish": [{}]}, "$.fish[0].kind", "Field required"),
        (dict[str, int], {"a": "b"}, "$[...]", "Expected `int`, got `str`"),
        (dict[int, int], {"a": 1}, "$", "Expected `int`, got `str`"),
        (Annotated[int, msgspec.Meta(ge=0)], -1, "$", ">= 0"),
        (Shoal, {"fish": [{"kind": "a"}, {"kind": 3}]}, "$.fish[1].kind", "valid string, got `int`"),
        (Fish, {"kind": "a", "finCount": -1}, "$.finCount", "greater than or equal to 0"),
        (dict[str, Fish], {"a b": 1}, '$["a b"]', "got `int`"),
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_invalid(annotation, value, path, words, format):
    found = fault(WireType(annotation), PACK[format](value), format)
    assert found.kind == "invalid"
    assert found.path == path
    assert words in found.message
    assert found.position is None


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "annotation,value,meant",
    [
        (Rows, {"row": []}, "; `row` is there, did you mean `rows`?"),
        (list[Rows], [{"rows": []}, {"rwos": []}], "; `rwos` is there, did you mean `rows`?"),
        (Shoal, {"fish": [{"knid": "a", "finCount": 1}]}, "; `knid` is there, did you mean `kind`?"),
        (Rows, {"entirely": []}, ""),
        (Rows, {"x": []}, ""),  # a field of another type inside
        (Rows, {}, ""),
    ],
)
def test_a_misspelt_field_is_named_with_the_one_that_is_missing(annotation, value, meant, format):  # F56
    wire = WireType(annotation)
    body = PACK[format](value)
    with pytest.raises(Exception) as caught:
        wire.decoder(format)(body)
    message = explain(caught.value, body, wire).message
    assert meant in message
    assert ("did you mean" in message) == bool(meant)


def test_every_problem_has_its_path():  # F56
    found = fault(WireType(Shoal), b'{"fish": [{"kind": 1}, {}]}')
    assert found.path == "$.fish[0].kind"
    assert [problem["path"] for problem in found.problems] == ["$.fish[0].kind", "$.fish[1].kind"]
    assert [problem["message"] for problem in found.problems] == [
        "Input should be a valid string, got `int`",
        "Field required",
    ]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "annotation,value,where", [(Rows, {"data": {"rows": []}}, "data"), (Shoal, {"inputs": {"fish": []}}, "inputs")]
)
def test_a_sample_that_stands_a_level_too_deep_is_found(annotation, value, where, format):
    wire, body = WireType(annotation), PACK[format](value)
    with pytest.raises(Exception) as caught:
        wire.decoder(format)(body)
    assert f"; it stands in `{where}`, leave that level out" in explain(caught.value, body, wire).message


def test_a_type_that_is_right_is_not_named_as_what_is_wrong():
    found = fault(WireType(Fish), PACK["json"]({"kind": "a", "finCount": -1}))
    assert found.message == "Input should be greater than or equal to 0 - at `$.finCount`"


def test_only_the_first_ten_problems_are_named():
    found = fault(WireType(list[Fish]), json.dumps([{"kind": 1}] * 25).encode())
    assert found.message.count("valid string") == 10
    assert found.message.endswith("and 15 more")


def test_values_of_the_client_are_not_repeated_by_pydantic_problems():
    assert "secret" not in fault(FISH, b'{"kind": "a", "finCount": "secret"}').message


def test_an_exception_of_user_code_is_internal():
    @dataclasses.dataclass
    class Broken:
        a: int

        def __post_init__(self):
            raise KeyError("password")

    found = fault(WireType(Broken), b'{"a": 1}')
    assert found.kind == "internal"
    assert "password" not in found.message


# ---------------------------------------------------------------------------------------------------------------------
# Annotations of methods


def annotations(model):
    return tuple(wire.annotation for wire in io_types(model))


def returning(annotation, *, generates=False):
    def predict(self, batch):
        return []

    def stream(self, batch):
        yield []

    method = stream if generates else predict
    method.__annotations__ = {"batch": list[int], "return": annotation}
    return type("M", (), {"predict": method})


def taking(annotation):
    def predict(self, batch):
        return []

    predict.__annotations__ = {"batch": annotation}
    return type("M", (), {"predict": predict})


def test_predict_alone():
    class M:
        def predict(self, batch: list[Point]) -> list[Rows]: ...

    assert annotations(M) == (Point, Rows)
    assert [wire.direction for wire in io_types(M)] == ["input", "output"]


def test_hooks_win():
    class M:
        def preprocess(self, sample: Point) -> np.ndarray: ...
        def predict(self, batch: dict) -> int: ...
        def postprocess(self, result) -> Rows: ...

    M.predict.__annotations__["batch"] = "Missing"  # only the annotations that matter are resolved
    assert annotations(M) == (Point, Rows)


def test_unannotated_is_anything():
    class M:
        def predict(self, batch): ...

    class Hooks(M):
        def preprocess(self, sample): ...
        def postprocess(self, result): ...

    assert annotations(M) == annotations(Hooks) == (Any, Any)


def test_inherited_and_hidden_hooks():
    class Base:
        def preprocess(self, sample: Point): ...
        def predict(self, batch: list[int]) -> list[int]: ...

    class M(Base): ...

    Hidden = type("Hidden", (Base,), {"preprocess": None})

    assert annotations(M) == (Point, int)
    assert annotations(Hidden) == (int, int)


def test_identity_hooks_of_the_base_class_say_nothing():
    def preprocess(self, sample: Any) -> Any:
        return sample

    preprocess.__module__ = "forebay.serving.models.model"
    assert annotations(type("M", (taking(list[Point]),), {"preprocess": preprocess})) == (Point, Any)


def test_string_annotations_see_the_class_around_them():
    class M:
        class In(msgspec.Struct):
            a: int

        def predict(self, batch: "list[In]") -> "list[Point]": ...

    assert annotations(M) == (M.In, Point)


def test_static_methods_and_wrappers():
    class M:
        @staticmethod
        def preprocess(sample: Point): ...

        @classmethod
        def predict(cls, batch: list[int]) -> list[Rows]: ...

    assert annotations(M) == (Point, Rows)


@pytest.mark.parametrize("annotation", [list[int], Sequence[int], tuple[int, ...], Annotated[list[int], "note"]])
def test_batches(annotation):
    assert annotations(taking(annotation))[0] is int
    assert annotations(returning(annotation))[1] is int


@pytest.mark.parametrize("annotation", [list, Sequence, tuple, Any, object])
def test_bare_batches_hold_anything(annotation):
    assert annotations(taking(annotation))[0] is Any
    assert annotations(returning(annotation))[1] is Any


@pytest.mark.parametrize(
    "annotation", [Iterator[list[int]], Generator[list[int], None, None], AsyncIterator[Sequence[int]]]
)
def test_streams(annotation):
    assert annotations(returning(annotation))[1] is int


def test_a_stream_may_have_nothing_for_a_sample_and_sends_none_of_that():
    class Finished:
        def predict(self, batch: list[str]):
            yield batch

        def postprocess(self, part: str) -> bytes | None: ...

    annotation = Iterator[list[int | None]]
    assert annotations(returning(annotation, generates=True))[1] is int
    assert annotations(Finished)[1] is bytes
    assert annotations(returning(list[int | None]))[1] == int | None


def test_iterable_streams_only_from_a_generator():
    assert annotations(returning(Iterable[list[int]], generates=True))[1] is int
    assert annotations(returning(Iterable[list[int]]))[1] == list[int]
    assert annotations(returning(Iterator))[1] is Any


@pytest.mark.parametrize(
    "kind, body, numbers",
    [
        (np.float64, b"[100000000000000000000, 0.5]", [1e20, 0.5]),  # as JavaScript writes 1e20
        (np.float32, b"[[100000000000000000000]]", [[np.float32(1e20)]]),
        (np.float16, b"[65504]", [65504]),
        (np.float32, b"[1e-300]", [0]),
        (np.float32, b"[1e300]", None),
        (np.float16, b"[100000]", None),
        (np.float64, b"[1%s]" % (b"0" * 400), None),
        (np.float64, b"[100000000000000000000, null]", None),
        (np.float64, b'[100000000000000000000, "1"]', None),
        (np.int64, b"[100000000000000000000]", None),
        (np.int64, b"[true]", None),
        (np.float32, b"[[true], [false]]", None),
        (np.float32, b"[1, true]", None),
        (np.float64, b"[[0.5, 1], [false, 2]]", None),
        (np.float64, b"[100000000000000000000, true]", None),
        (np.int64, b"[1, true]", None),
        (np.bool_, b"[true, false]", [True, False]),
    ],
)
def test_an_array_has_the_numbers_that_came_or_none(kind, body, numbers):
    given = WireType(np.ndarray[Any, np.dtype[kind]])
    if numbers is None:
        assert fault(given, body).message.startswith(f"Expected an array of {np.dtype(kind)}")
    else:
        read = given.decoder("json")(body)
        assert (read.dtype, read.tolist()) == (kind, numbers)


@pytest.mark.parametrize(
    "kind, texts, numbers",
    [
        (np.float32, ["1", "-2.5e1"], [1, -25]),
        (np.float64, ["7"], [7]),
        (np.float16, ["100000"], None),
        (np.int64, ["9007199254740993"], [9007199254740993]),  # which is no float
        (np.int32, ["1.5"], None),
        (np.uint8, ["-1"], None),
        (np.bool_, ["true", "0"], [True, False]),
        (np.bool_, ["2"], None),
    ],
)
def test_an_array_has_the_numbers_that_the_texts_of_a_query_are(kind, texts, numbers):
    given = WireType(msgspec.defstruct("Given", [("x", np.ndarray[Any, np.dtype[kind]])]))
    query = "&".join(f"x={text}" for text in texts).encode()
    if numbers is None:
        assert fault(given, query, "query").message == f"Expected an array of {np.dtype(kind)} - at `$.x`"
    else:
        read = given.decoder("query")(query).x
        assert (read.dtype, read.tolist()) == (kind, numbers)
    assert fault(given, json.dumps({"x": texts}).encode()).path == "$.x"  # JSON has numbers


@pytest.mark.parametrize(
    "sent",
    [["x" * 400_000] + [""] * 400_000, [*range(9), "x"], [[1.5, "x"], [2, 3]], [[], [["1"]]], [10**400, 1.5, "1"]],
)
@pytest.mark.parametrize("format", ["json", "msgpack"])
def test_a_text_is_no_number_and_takes_no_room_in_an_array(format, sent):  # NumPy's own of the first take 640 GB
    if format == "msgpack":
        sent = [one for one in sent if one != 10**400]
    body = json.dumps({"x": sent}).encode() if format == "json" else msgspec.msgpack.encode({"x": sent})
    given = WireType(msgspec.defstruct("Given", [("x", np.ndarray[Any, np.dtype[np.float32]])]))
    assert fault(given, body, format).path == "$.x"


def test_an_array_of_results_says_nothing_about_a_row():
    assert annotations(returning(np.ndarray))[1] is Any
    assert annotations(returning(np.ndarray[Any, np.dtype[np.float32]]))[1] is Any


def test_constraints_survive():
    class M:
        def predict(self, batch: list[Annotated[int, msgspec.Meta(ge=0)]]) -> list[int]: ...

    assert fault(io_types(M)[0], b"-1").kind == "invalid"


def test_outputs_nobody_could_read_are_fine():
    class Untagged(msgspec.Struct):
        a: int

    for annotation in (list[Point | Untagged], list[np.ndarray], list[complex]):
        out = io_types(returning(annotation))[1]
        assert isinstance(out.json_schema(TEMPLATE)[0], dict)
    assert out.encoder("json")(np.arange(2)) == b"[0,1]"


def test_what_is_wrong_with_an_annotation_is_told_with_file_and_line():
    class Wrong:
        def predict(self, batch: list[complex]) -> list[str]:
            return ["".join(map(str, batch))]

    line = Wrong.predict.__code__.co_firstlineno
    with pytest.raises(ConfigError, match=rf"test_schema\.py:{line}: .*Wrong\.predict: parameter `batch`"):
        io_types(Wrong)


@pytest.mark.parametrize(
    "model,words",
    [
        (type("M", (), {}), ["M has no method `predict`"]),
        (taking("list[Missing]"), ["M.predict", "parameter `batch`", "`list[Missing]`", "cannot be resolved"]),
        (returning("list[Missing]"), ["M.predict", "the return value", "`list[Missing]`"]),
        (taking(dict[str, int]), ["M.predict", "parameter `batch`", "`dict[str, int]`", "list[...]"]),
        (taking(np.ndarray), ["M.predict", "`numpy.ndarray`", "preprocess"]),
        (returning(int), ["M.predict", "the return value", "`int`", "one result for each sample"]),
        (returning(None), ["M.predict", "`None`"]),
        (taking(list[np.ndarray]), ["M.predict", "`numpy.ndarray` cannot be read from a request"]),
        (taking(list[Point | Rows]), ["M.predict", "Point", "must be tagged"]),
        (type("M", (), {"predict": 3}), ["M.predict", "`int`", "expected a method"]),
        (type("M", (), {"predict": lambda: None}), ["expected one argument"]),
    ],
)
def test_config_errors_name_the_place(model, words):
    with pytest.raises(ConfigError) as caught:
        io_types(model)
    for word in words:
        assert word in caught.value.message


def test_a_type_inside_a_struct_that_cannot_be_read():
    class Deep(msgspec.Struct):
        children: list[Tree]
        image: Annotated[np.ndarray, msgspec.Meta(description="pixels")]

    with pytest.raises(ConfigError, match=r"numpy\.ndarray"):
        WireType(Deep)


@dataclasses.dataclass
class Setting:
    level: int = 3
    unit: str = "dB"
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Channel(Generic[T]):
    value: T
    gain: float = 1.5


@dataclasses.dataclass(slots=True)
class Desk:
    setting: Setting | None = None
    channels: dict[str, list[Channel[int] | int]] = dataclasses.field(default_factory=dict)


class Studio(msgspec.Struct):
    desks: list[Desk]
    pair: tuple[int, Setting] | None = None


@dataclasses.dataclass
class Branch:
    twigs: "list[Branch]" = dataclasses.field(default_factory=list)
    length: int = 1
    grows_on: "Branch | None" = None

    def __post_init__(self):
        for twig in self.twigs:
            twig.grows_on = self


SETTING = {"level": 3, "unit": "dB", "tags": []}


@pytest.mark.parametrize(
    "annotation, sent, back",
    [
        (Setting, {"unit": "V"}, {**SETTING, "unit": "V"}),
        (Annotated[Setting | None, "of a desk"], {}, SETTING),
        (Channel[int], {"value": 1}, {"value": 1, "gain": 1.5}),
        (
            Studio,
            {"desks": [{"setting": {}, "channels": {"a": [1, {"value": 2}]}}, {}], "pair": [1, {}]},
            {
                "desks": [
                    {"setting": SETTING, "channels": {"a": [1, {"value": 2, "gain": 1.5}]}},
                    {"setting": None, "channels": {}},
                ],
                "pair": [1, SETTING],
            },
        ),
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_what_a_client_left_out_of_a_dataclass_is_there_where_it_is_given_back(annotation, sent, back, format):
    read, write = WireType(annotation), WireType(annotation, "output").encoder(format)
    for sample in (read.decoder(format)(PACK[format](sent)), read.converter()(sent)):
        assert UNPACK[format](write(sample)) == back


def test_dataclasses_that_their_own_code_links_in_a_circle_are_read():
    found = WireType(Branch).decoder("json")(b'{"twigs": [{}]}')
    assert found.twigs[0].grows_on is found
    assert vars(found.twigs[0])["length"] == 1


def test_pydantic_is_found_inside_other_types():
    @dataclasses.dataclass
    class Outer:
        fish: list[Fish]

    @dataclasses.dataclass
    class Counted:
        n: Annotated[int, annotated_types.Gt(0)]

    assert WireType(Outer).decoder("json")(b'{"fish": [{"kind": "a"}]}') == Outer([Fish(kind="a")])
    assert fault(WireType(Counted), b'{"n": 0}').kind == "invalid"


def test_pydantic_inside_a_struct_is_refused():
    class Mixed(msgspec.Struct):
        fish: Fish

    with pytest.raises(ConfigError, match="Mixed"):
        WireType(Mixed)


def test_pydantic_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(ConfigError, match=r"pip install forebay\[pydantic\]"):
        WireType(Fish)
    assert WireType(Point).decoder("json")(b'{"x": 1}') == Point(1)


# ---------------------------------------------------------------------------------------------------------------------
# Schemas


def test_schemas():
    assert WireType(bytes).json_schema(TEMPLATE) == ({"type": "string", "format": "binary"}, {})
    assert WireType(Any).json_schema(TEMPLATE) == ({}, {})
    schema, parts = WireType(Rows).json_schema(TEMPLATE)
    assert schema == {"$ref": "#/components/schemas/Rows"}
    assert set(parts) == {"Rows", "Point"}
    assert parts["Rows"]["properties"]["rows"]["items"] == {"$ref": "#/components/schemas/Point"}
    schema, parts = WireType(Shoal).json_schema(TEMPLATE)
    assert schema == {"$ref": "#/components/schemas/Shoal"}
    assert parts["Shoal"]["properties"]["fish"]["items"] == {"$ref": "#/components/schemas/Fish"}


def test_pydantic_schemas_differ_by_direction():
    assert WireType(Fish).json_schema(TEMPLATE)[0]["required"] == ["kind"]
    assert WireType(Fish, "output").json_schema(TEMPLATE)[0]["required"] == ["kind"]

    class Stamped(pydantic.BaseModel):
        @pydantic.computed_field
        @property
        def at(self) -> int:
            return 1

    assert "at" not in WireType(Stamped).json_schema(TEMPLATE)[0].get("properties", {})
    assert "at" in WireType(Stamped, "output").json_schema(TEMPLATE)[0]["properties"]


def test_untagged_unions_are_described():
    schema, parts = WireType(Point | Rows, "output").json_schema(TEMPLATE)
    assert schema["anyOf"] == [{"$ref": "#/components/schemas/Point"}, {"$ref": "#/components/schemas/Rows"}]
    assert set(parts) == {"Point", "Rows"}


class Page(msgspec.Struct):
    size: int = 1
    text: str | None = None
    thumb: File | None = None


@pytest.mark.parametrize("format", FORMATS)
def test_a_body_with_fields_beside_it_is_held_to_its_type_before_objects_are_made(format):  # F73
    read = WireType(Page, "input").reader({"in": format, FIELDS: [("size", "5"), ("thumb", "ab")]})
    found = read(PACK[format]({"text": "a"}))
    assert (found.size, found.text, found.thumb.read()) == (5, "a", b"ab")
    body = PACK[format]({"text": [[0]] * 200_000})
    tracemalloc.start()
    try:
        with pytest.raises(msgspec.ValidationError, match=r"Expected `str \| null`, got `array` - at `\$.text`"):
            read(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(body)  # its lists would take 120 bytes each


def test_texts_of_other_classes_in_an_answer_cross_to_another_process():
    text = np.array(["x-a"])[0]
    assert type(text) is not str
    assert {type(one) for pair in checked_headers([(text, text)]) for one in pair} == {str}
    media = Media(np.bytes_(b"a"), np.str_("image/png"))
    assert (type(media.body), type(media.type)) == (bytes, str)
