# SPDX-License-Identifier: Apache-2.0
"""What the reader of ModelInferRequest makes of bytes is what the protobuf library makes of them."""

import struct

from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.errors import InvalidRequest
from forebay.protocols.kserve import request_layouts, response_bytes
from forebay.protocols.kserve.infer_calls import InferResponse
from forebay.protocols.kserve.messages import messages
from forebay.types.tensor import Tensor

M = messages()
QUICK = settings(max_examples=200, deadline=None, derandomize=True, database=None)

# ---------------------------------------------------------------------------------------------------------------------
# bytes as clients write them, and as they should not


def varint(value, extra=0):
    """A varint, as short as can be or with `extra` bytes that say nothing."""
    found = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        if not value and not extra:
            return bytes(found) + bytes([low])
        if not value:
            return bytes(found) + bytes([low | 0x80]) + b"\x80" * (extra - 1) + b"\x00"
        found.append(low | 0x80)


def tag(number, kind):
    return varint(number << 3 | kind)


def field(number, content):
    return tag(number, 2) + varint(len(content)) + content


texts = st.one_of(
    st.sampled_from([b"", b"x", b"FP32", b"INT64", b"BYTES", b"simple"]),
    st.text(max_size=5).map(str.encode),
    st.binary(max_size=4),
)
numbers = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**63, 2**64 - 1]))
varints = st.builds(varint, numbers, st.sampled_from([0, 0, 0, 1, 3, 9, 10]))
kinds = st.sampled_from([0, 1, 2, 2, 2, 3, 4, 5, 6, 7])


@st.composite
def odd(draw):
    """A field that nobody expects: any number, any wire type."""
    number = draw(st.one_of(st.integers(0, 9), st.sampled_from([15, 16, 2**29 - 1, 2**29, 2**40])))
    kind = draw(kinds)
    if kind == 0:
        return tag(number, 0) + draw(varints)
    if kind in {1, 5}:
        return tag(number, kind) + draw(st.binary(min_size=8, max_size=8))[: 8 if kind == 1 else 4]
    if kind == 2:
        return field(number, draw(st.one_of(texts, st.binary(max_size=12))))
    if kind == 3:
        end = draw(st.sampled_from([number, number, number, number + 1]))
        return tag(number, 3) + draw(st.lists(odd(), max_size=2).map(b"".join)) + tag(end, 4)
    return tag(number, kind)


def message(*fields):
    """Fields in any order, each any number of times, with others between them."""
    fields = st.lists(st.one_of(*fields, *fields, odd()), max_size=6)

    @st.composite
    def some(draw):  # it prints as its name, and not as all it is made of
        return b"".join(draw(fields))

    return some()


parameter_values = message(
    varints.map(lambda value: tag(1, 0) + value),
    varints.map(lambda value: tag(2, 0) + value),
    texts.map(lambda text: field(3, text)),
    st.floats(allow_nan=False).map(lambda value: tag(4, 1) + struct.pack("<d", value)),
    varints.map(lambda value: tag(5, 0) + value),
)
parameters = message(texts.map(lambda text: field(1, text)), parameter_values.map(lambda value: field(2, value)))
contents = message(
    st.binary(max_size=12).map(lambda data: field(6, data)),
    st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(
        lambda values: field(6, struct.pack(f"<{len(values)}f", *values))
    ),
    st.floats(width=32, allow_nan=False).map(lambda value: tag(6, 5) + struct.pack("<f", value)),
    varints.map(lambda value: tag(3, 0) + value),
    st.lists(varints, max_size=3).map(lambda values: field(2, b"".join(values))),
)
inputs = message(
    texts.map(lambda text: field(1, text)),
    texts.map(lambda text: field(2, text)),
    varints.map(lambda value: tag(3, 0) + value),
    st.lists(varints, max_size=3).map(lambda values: field(3, b"".join(values))),
    parameters.map(lambda entry: field(4, entry)),
    contents.map(lambda data: field(5, data)),
)
outputs = message(texts.map(lambda text: field(1, text)), parameters.map(lambda entry: field(2, entry)))
requests = message(
    texts.map(lambda text: field(1, text)),
    texts.map(lambda text: field(2, text)),
    texts.map(lambda text: field(3, text)),
    parameters.map(lambda entry: field(4, entry)),
    inputs.map(lambda data: field(5, data)),
    outputs.map(lambda data: field(6, data)),
    st.binary(max_size=9).map(lambda data: field(7, data)),
)


@st.composite
def sound(draw):
    """A request that says the same in all its parts, its fields in any order."""
    fields = [field(1, b"m"), field(3, draw(texts.filter(bytes.isascii)))]
    raws, is_raw = [], draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        values = draw(st.lists(st.floats(width=32, allow_nan=False), max_size=4))
        data = struct.pack(f"<{len(values)}f", *values)
        about = [field(1, draw(texts.filter(bytes.isascii))), field(2, b"FP32"), field(3, varint(len(values)))]
        if not is_raw:
            about.append(field(5, field(6, data)))
        raws.append(field(7, data))
        fields.append(field(5, b"".join(draw(st.permutations(about)))))
    if is_raw:
        fields += raws
    return b"".join(draw(st.permutations(fields)))


@st.composite
def spoiled(draw):
    """A request with a byte or two changed, or an end cut off."""
    data = bytearray(draw(st.one_of(requests, sound())))
    for _ in range(draw(st.integers(0, 2))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, 0x0B, 0x0C]))
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)


# ---------------------------------------------------------------------------------------------------------------------
# the comparison


def as_told(entries):
    """A map of parameters as the library has it; those without a value are none for us."""
    chosen = {key: one.WhichOneof("parameter_choice") for key, one in entries.items()}
    return {key: repr(getattr(entries[key], which)) for key, which in chosen.items() if which}


def shown(found):
    return {key: repr(value) for key, value in found.items()}


def check(data):
    """What is read from the data is what the library reads; returns the layout, or None if it is no request."""
    try:
        expected = M.ModelInferRequest.FromString(data)
    except Exception:
        expected = None
    layout, refusal = None, ""
    try:
        layout = request_layouts.scan(data)
        if expected is None:  # what is within typed contents is read later
            layout.request(data)
    except InvalidRequest as error:
        refusal = error.message
    if expected is None:
        assert refusal
        return None
    if layout is None:
        assert "expected a ModelInferRequest" not in refusal, refusal
        return None
    view = memoryview(data)
    assert (layout.model, layout.version, layout.id_in(data)) == (
        expected.model_name,
        expected.model_version,
        expected.id,
    )
    assert shown(layout.parameters) == as_told(expected.parameters)
    assert [(one.name, shown(one.parameters)) for one in layout.outputs] == [
        (one.name, as_told(one.parameters)) for one in expected.outputs
    ]
    for one, span, other in zip(layout.inputs, layout.data, expected.inputs, strict=True):
        assert (one.name, one.datatype, one.shape) == (other.name, other.datatype, tuple(other.shape))
        assert shown(one.parameters) == as_told(other.parameters)
        whole = M.InferTensorContents.FromString(b"".join(view[start:end] for start, end in one.contents))
        assert whole == other.contents
        if span is not None and one.contents:
            size = 4 if one.datatype == "FP32" else 8
            values = whole.fp32_contents if size == 4 else whole.fp64_contents
            found = struct.unpack(f"<{len(values)}{'f' if size == 4 else 'd'}", view[span[0] : span[1]])
            assert list(map(repr, found)) == list(map(repr, values))
    if expected.raw_input_contents:
        spans = [span or (0, 0) for span in layout.data]
        assert [view[start:end] for start, end in spans] == list(expected.raw_input_contents)
    return layout


@QUICK
@given(data=st.one_of(requests, sound(), spoiled(), st.binary(max_size=30)))
@example(data=b"")
@example(data=b"\x0a")
@example(data=b"\x0a\xff\xff\xff\xff\x0f")
@example(data=b"\x08" + b"\x80" * 9 + b"\x01")
@example(data=b"\x08" + b"\x80" * 10 + b"\x01")
@example(data=b"\x08" + b"\xff" * 9 + b"\x7f")
@example(data=b"\x0b" * 99 + b"\x0c" * 99)
@example(data=b"\x0b" * 102 + b"\x0c" * 102)
@example(data=b"\x0c")
@example(data=b"\x00\x00")
@example(data=b"\x8a\x80\x80\x80\x00\x01x")
@example(data=b"\x8a\x80\x80\x80\x80\x00\x01x")
@example(data=b"\xff\xff\xff\xff\x1f\x00")
@example(data=field(5, field(5, b"\x0b") + field(2, b"FP32")))
@example(data=field(5, field(2, b"FP32") + field(3, b"\x01") + field(5, field(6, b"1234"))) + field(7, b"1234"))
def test_the_reader_reads_what_the_library_reads(data):
    check(data)


@QUICK
@given(
    first=st.one_of(sound(), spoiled()),
    second=st.one_of(sound(), spoiled()),
    cuts=st.lists(st.integers(0, 60), max_size=3),
)
def test_a_layout_is_only_used_for_messages_it_fits(first, second, cuts):
    layouts = request_layouts.RequestLayouts()
    changed = bytearray(first)
    for cut in cuts:
        if cut < len(changed):
            changed[cut] ^= 1
    for data in (first, bytes(changed), second, first, bytes(changed)):
        alone = check(data)
        try:
            found = layouts.of(data)
            told = found.request(data)
        except InvalidRequest:
            continue
        assert alone is not None
        wanted = alone.request(data)
        assert (told.model, told.version, told.id, told.outputs) == (
            wanted.model,
            wanted.version,
            wanted.id,
            wanted.outputs,
        )
        assert [(one.name, one.datatype, one.shape, bytes(one.data)) for one in told.inputs] == [
            (one.name, one.datatype, one.shape, bytes(one.data)) for one in wanted.inputs
        ]
        assert shown(told.parameters) == shown(wanted.parameters)


outputs = st.lists(
    st.tuples(st.text(max_size=5), st.sampled_from(["FP32", "BYTES", ""]), st.lists(st.integers(0, 2**62), max_size=3)),
    max_size=3,
)
parameters = st.dictionaries(
    st.text(max_size=3),
    st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=3),
    max_size=3,
)
FIELDS = {bool: "bool_param", float: "double_param", str: "string_param"}


def _told(into, values):
    for name, value in values.items():
        usual = "int64_param" if type(value) is int and value < 2**63 else "uint64_param"
        setattr(into[name], FIELDS.get(type(value), usual), value)


@given(st.tuples(*[st.text(max_size=5)] * 3), outputs, parameters, parameters, st.booleans())
@settings(max_examples=300, deadline=None)
def test_what_is_written_is_what_the_library_reads(named, outputs, parameters, about, is_long):
    model, version, name = named
    expected = messages().ModelInferResponse(model_name=model, model_version=version, id=name)
    tensors, places = [], {}
    for number, (output, datatype, shape) in enumerate(outputs):
        data = bytes([number]) * (response_bytes.JOINED_BYTES + number if is_long and number else number)
        tensors.append(Tensor(output, datatype, tuple(shape), data))
        one = expected.outputs.add(name=output, datatype=datatype, shape=shape)
        expected.raw_output_contents.append(data)
        if output == outputs[0][0]:  # as wherever a name comes twice
            places[output] = about
            _told(one.parameters, about)
    _told(expected.parameters, parameters)
    for _ in range(2):  # the second time its beginnings are remembered
        told = InferResponse(model=model, version=version, id=name, outputs=tensors, parameters=parameters)
        found = response_bytes.response(told, places)
        sent = found if isinstance(found, bytes) else b"".join(found)
        assert messages().ModelInferResponse.FromString(sent) == expected
