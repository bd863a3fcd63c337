# SPDX-License-Identifier: Apache-2.0
"""What becomes Python objects is counted before, in each protocol's own words."""

import asyncio
import contextlib
import tracemalloc
from types import SimpleNamespace

import msgspec
import pytest

from forebay.errors import ForebayError, InvalidRequest, TooLarge
from forebay.protocols.kserve import rest as kserve
from forebay.protocols.openai import request_reading
from forebay.protocols.tfserving.example_bodies import decode_examples
from forebay.protocols.tfserving.predict_bodies import as_tensors, read_predict
from forebay.serving.tensor_face import TensorFace
from forebay.surfaces.pipeline.protocol.literal import parse
from forebay.types.element_limits import ElementLimits, at_once
from forebay.types.tensor import TensorMetadata
from forebay.workers.wire.frames import FrameReader, encode
from forebay.workers.wire.job_frames import JobFrameReader, encode_answer

FACE = TensorFace(inputs=[TensorMetadata("x", "FP32", (-1, -1))], outputs=[TensorMetadata("y", "FP32", (-1,))])
encode_json = msgspec.json.encode


def made_bytes(work):
    """Return what work took at its peak, and what it raised; decoders are made at their first use."""
    with contextlib.suppress(Exception):
        work()
    tracemalloc.start()
    try:
        work()
    except Exception as error:
        return tracemalloc.get_traced_memory()[1], error
    else:
        return tracemalloc.get_traced_memory()[1], None
    finally:
        tracemalloc.stop()


def asked(**more):
    return encode_json({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1], **more}]})


@pytest.mark.parametrize("value", ["[[]]", "{}", '{"a":[1]}', "0"])
@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_nothing_is_made_of_parameters_that_nobody_knows(side, value):  # F73
    listed = b"[" + b",".join([value.encode()] * 60_000) + b"]"
    plain = asked()
    body = {
        "inputs": plain[:-3] + b',"parameters":{"a":%b}}]}' % listed,
        "outputs": plain[:-1] + b',"outputs":[{"name":"y","parameters":{"a":%b}}]}' % listed,
    }[side]
    took, error = made_bytes(lambda: kserve.decode_request(body))
    assert took < 4 * len(body) + 2**20
    assert error is None or isinstance(error, TooLarge)


def test_known_parameters_are_values_and_no_lists():  # F73
    with pytest.raises(InvalidRequest, match=r"got `array` - at `\$\.inputs\[0\]\.parameters\.binary_data_size`"):
        kserve.decode_request(asked(parameters={"binary_data_size": [1]}))
    assert kserve.decode_request(asked(parameters={"content_type": {"of": ["another server"]}})).inputs[0].name == "x"


@pytest.mark.parametrize("count", [99_000, 101_000])
def test_axes_are_counted_before_they_are_made(count):  # F75
    body = asked(shape=[1] * count)
    took, error = made_bytes(lambda: kserve.decode_request(body))
    if count < kserve.MAX_ITEMS:
        assert error is None
    else:
        assert "the request: expected at most 100000 elements beside its data" in str(error)
        assert took < 4 * len(body) + 2**20


def test_the_data_of_inputs_is_counted_apart_from_what_is_beside_it():
    limits = ElementLimits(200_000, 1000)
    at_once(kserve.counting(asked(data=[1] * 199_000), limits=limits))
    with pytest.raises(TooLarge, match="the data of the inputs: expected at most 200000 elements"):
        at_once(kserve.counting(asked(data=[1] * 200_500), limits=limits))
    with pytest.raises(TooLarge, match="expected at most 201000 elements in arrays"):
        at_once(kserve.counting(asked(data=[1] * 300_000), limits=limits))
    at_once(kserve.counting(asked(data=[",[:" * 50_000]), limits=limits))  # which is one text
    with pytest.raises(TooLarge, match="expected at most 1000 objects and members"):
        at_once(kserve.counting(asked(parameters={f"a{n}": 1 for n in range(20_000)}), limits=limits))


def test_an_output_is_named_once():  # F76
    with pytest.raises(InvalidRequest, match="output 'y' already exists in request"):
        FACE.ask(kserve.decode_request(asked(shape=[1, 1])).inputs, ["y", "y"])


def test_stop_sequences_are_counted_before_they_are_made():  # F75
    body = b'{"model":"m","stop":[%b]}' % b",".join([b'"a"'] * 1_000_000)
    took, error = made_bytes(lambda: request_reading.read(body))
    assert took < 2 * len(body)
    assert isinstance(error, ForebayError)
    assert error.message == "'stop' is longer than 16 texts may be"
    longest = ["\U0001f600" * 256] * 16
    assert request_reading.read(b'{"model":"m","stop":%b}' % encode_json(longest)).stops == longest
    with pytest.raises(InvalidRequest, match=r"length <= 16 - at `\$\.stop`"):
        request_reading.read(b'{"model":"m","stop":%b}' % encode_json(["a"] * 17))


def test_names_that_are_said_for_each_sample_are_counted():  # F75
    body = encode_json({"model": "m", "prompt": ["a", "b"], **{f"a{n}": 0 for n in range(30_000)}})
    took, error = made_bytes(
        lambda: request_reading.samples_of(request_reading.COMPLETIONS, request_reading.read(body), body)
    )
    assert isinstance(error, TooLarge)
    assert error.message.startswith("a body of several samples: expected at most 20000 objects and members of objects,")
    assert took < 4 * len(body)


def tensors_of(body, face):
    return at_once(as_tensors(at_once(read_predict(body, 1)), face))


def test_names_of_columns_are_counted_before_they_are_made():  # F75
    body = b'{"inputs":{%b}}' % b",".join(b'"a%d":{}' % number for number in range(100_000))
    took, error = made_bytes(lambda: tensors_of(body, FACE))
    assert isinstance(error, TooLarge)
    assert error.message == "more than 4096 inputs came, which is as many as are taken"
    assert took < 4 * len(body)
    texts = {"x": [{"b64": "eA=="}] * 5000}
    face = TensorFace(inputs=[TensorMetadata("x", "BYTES", (-1,))])
    (tensor,) = tensors_of(encode_json({"inputs": texts}), face)
    assert tensor.shape == (5000,)


@pytest.mark.parametrize("value", [b'"ab"', b'["ab"]', b'{"b64":"eA=="}'])
def test_texts_of_columns_are_counted_before_they_are_made(value):  # F75
    face = TensorFace(inputs=[TensorMetadata("x", "BYTES", (-1, -1))])
    body = b'{"inputs":[%b]}' % b",".join([value] * 250_000)
    took, error = made_bytes(lambda: tensors_of(body, face))
    assert isinstance(error, TooLarge)
    assert "input 'x': expected at most 200000 elements in arrays" in error.message
    assert took < 4 * len(body)


def test_values_of_examples_are_counted_before_they_are_made():
    body = encode_json({"examples": [{"x": [[]] * 300_000}]})
    took, error = made_bytes(lambda: decode_examples(body))
    assert isinstance(error, TooLarge)
    assert "the request: expected at most 400000 elements in arrays" in error.message
    assert took < 4 * len(body)


@pytest.mark.parametrize("inner", ["({0}),", "(({0}),),", "((),) * 70"])
def test_long_tuples_are_no_keys(inner):  # F79
    key = inner.format("-1, -2, " * 40) if "{" in inner else "(" + "(), " * 70 + "),"
    assert parse(f"{{{key}}}", "literal") == f"{{{key}}}"
    short = {(1, (2, "a")), (3,), ()}
    assert parse(str(short), "literal") == short


def test_values_in_frames_are_counted_before_they_are_made():
    """A worker with the secret stopped the loop with 16 million empty maps (F75)."""
    frame = encode([{}] * 1000)
    assert list(FrameReader(max_elements=1001).feed(frame)) == [[{}] * 1000]
    assert list(FrameReader().feed(frame)) == [[{}] * 1000]
    with pytest.raises(InvalidRequest, match="a frame: expected at most 1000 elements, got more"):
        list(FrameReader(max_elements=1000).feed(frame))
    job = encode_answer({str(number): b"" for number in range(100)})
    assert len(list(JobFrameReader(max_elements=201).feed(job))) == 1
    with pytest.raises(InvalidRequest, match="expected at most 200 elements"):
        list(JobFrameReader(max_elements=200).feed(job))


def test_a_method_of_grpc_is_told_of_no_message_with_too_many():  # F74
    grpc = pytest.importorskip("forebay.transports.grpc.methods")
    from forebay.protocols.tfserving.messages import PREDICTION, SERVING
    from forebay.transports.grpc.service import GrpcService

    told, refused = [], []

    class Call:
        head = SimpleNamespace(tenant=None)

        def run(self, work):
            asyncio.run(work)

        def fail_by(self, error, method, own):
            refused.append((method, str(error), own[TooLarge].name))

    service = GrpcService(
        full_name=PREDICTION,
        direct={"Predict": lambda message, _call: told.append(message)},
        files=SERVING.described(),
    )
    method = grpc.by_path([service], ElementLimits(100, 50))[f"/{PREDICTION}/Predict".encode()]
    few, many = SERVING.classes().PredictRequest(), SERVING.classes().PredictRequest()
    few.inputs["x"].string_val.extend([b""] * 90)
    many.inputs["x"].string_val.extend([b""] * 101)
    for message in (few, many):
        method.begin(Call(), message.SerializeToString())
    assert told == [few.SerializeToString()]
    assert refused == [(
        "Predict",
        "the field tensorflow.TensorProto.string_val: expected at most 100 elements of tensors, got more",
        "RESOURCE_EXHAUSTED",
    )]  # fmt: skip


def test_data_with_too_many_elements_is_told_from_what_stands_beside_it():
    """What a whole call may have is more than its data may."""
    limits = ElementLimits(tensors=70_000, elsewhere=30_000)
    with pytest.raises(TooLarge, match="the data of the inputs: expected at most 70000 elements"):
        at_once(kserve.counting(asked(data=[1] * 80_000, shape=[80_000]), limits=limits))
    at_once(kserve.counting(asked(data=[1] * 69_000, shape=[69_000]), limits=limits))
