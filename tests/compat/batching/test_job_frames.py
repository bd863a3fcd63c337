# SPDX-License-Identifier: Apache-2.0
"""The wire format of the original batching service, byte for byte."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import InvalidRequest
from forebay.workers.wire.job_frames import (
    READY,
    JobFrameReader,
    decode_answer,
    decode_jobs,
    encode_answer,
    encode_jobs,
)

ONE = "11111111-1111-4111-8111-111111111111"
TWO = "22222222-2222-4222-8222-222222222222"
ERRORS = b'[{"loc": ["num"], "msg": "bad", "type": "value"}]'[:48]

ids = st.uuids(version=4).map(str)
jobs = st.dictionaries(ids, st.binary(max_size=300), max_size=20)


def frame(payload):
    return len(payload).to_bytes(4, "big") + payload


def packed(value):
    return msgspec.msgpack.encode(value)


def test_one_job_and_its_answer_are_the_recorded_bytes():  # B41, B43
    expected = "0000002b 81 d924" + ONE.encode().hex() + "c4026869"
    assert encode_jobs({ONE: b"hi"}) == bytes.fromhex(expected)
    answer = bytes.fromhex("0000002a 81 d924" + ONE.encode().hex() + "a26f6b")
    assert encode_answer({ONE: "ok"}) == answer
    assert decode_answer(answer[4:]) == ({ONE: b"ok"}, [])


def test_two_jobs_of_which_one_fails_are_the_recorded_bytes():  # B43-B46
    sent = encode_jobs({ONE: b'{"text": "hi"}', TWO: b'{"text": "x"}'})
    assert sent[:5].hex() == "0000006c82"
    assert sent[5:].hex() == (
        f"d924{ONE.encode().hex()}c40e7b2274657874223a20226869227dd924{TWO.encode().hex()}c40d7b2274657874223a202278227d"
    )
    answer = encode_answer({ONE: '{"n": 2}', TWO: ERRORS.decode()}, [TWO])
    assert answer[:5].hex() == "000000b883"
    assert answer[5:].hex() == (
        f"d924{ONE.encode().hex()}a87b226e223a20327d"
        f"d924{TWO.encode().hex()}d930{ERRORS.hex()}"
        f"a96572726f725f696473d924{TWO.encode().hex()}"
    )
    assert decode_answer(answer[4:]) == ({ONE: b'{"n": 2}', TWO: ERRORS}, [TWO])
    packed_answer = encode_answer({ONE: packed({"n": 2}), TWO: packed("bad")}, [TWO])
    assert packed_answer[:4] == (137).to_bytes(4, "big")
    assert bytes.fromhex("c40481a16e02") in packed_answer
    assert bytes.fromhex("c404a3626164") in packed_answer


def test_sixteen_jobs_begin_with_a_longer_map():  # B43
    sixteen = {f"{ONE[:-2]}{number:02}": b"" for number in range(16)}
    assert encode_jobs(sixteen)[4:7].hex() == "de0010"


@pytest.mark.parametrize("value", [b"ok", "ok"])
@pytest.mark.parametrize("key", [ONE, ONE.encode()])
def test_results_and_ids_may_be_text_or_bytes(key, value):  # B44
    assert decode_answer(packed({key: value})) == ({ONE: b"ok"}, [])


def test_nil_is_an_empty_result():  # B44
    assert decode_answer(packed({ONE: None})) == ({ONE: b""}, [])


@pytest.mark.parametrize(
    "error_ids", [ONE + TWO, (ONE + TWO).encode(), [ONE, TWO], ONE + TWO + "33"], ids=["str", "bin", "list", "cut"]
)
def test_error_ids_in_four_spellings(error_ids):  # B45
    assert decode_answer(packed({"error_ids": error_ids})) == ({}, [ONE, TWO])


@pytest.mark.parametrize("payload", [b"", b"\x80", packed({"error_ids": ""}), packed({"error_ids": None})])
def test_an_answer_may_hold_nothing(payload):  # B47, B50
    assert decode_answer(payload) == ({}, [])


@pytest.mark.parametrize(
    "payload",
    [
        bytes.fromhex("93010203"),
        packed({ONE: 1}),
        packed({ONE: {}}),
        packed({ONE: ["x"]}),
        packed({1: b"x"}),
        packed({"error_ids": 1}),
        packed({"error_ids": b"\xff" * 36}),
        packed({b"\xff" * 36: b"x"}),
        packed({}) + b"\0",
        bytes.fromhex("81a1ffa0"),
        bytes.fromhex("8180a0"),
        b"\x91" * 9000,
        b"\x81" * 5000,
        b"\xc1",
    ],
)
def test_what_is_no_answer_is_refused_with_a_sentence(payload):  # B51
    with pytest.raises(InvalidRequest, match=r"[a-z]"):
        decode_answer(payload)


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 1001])
def test_a_length_over_the_limit_is_refused_at_once(length):  # B49
    with pytest.raises(InvalidRequest, match=f"{length} bytes were announced|{length} bytes was announced"):
        list(JobFrameReader(1000).feed(length.to_bytes(4, "big")))


def test_the_top_bit_is_refused_whatever_the_limit():  # B49
    with pytest.raises(InvalidRequest):
        list(JobFrameReader(1 << 40).feed(b"\x80\0\0\0"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=6), st.data())
def test_any_segmentation_gives_the_same_payloads(payloads, data):  # B48
    stream = b"".join(map(frame, payloads))
    reader, found = JobFrameReader(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert found == payloads


@given(jobs)
def test_jobs_come_back_in_their_order(bodies):  # B19
    (payload,) = JobFrameReader().feed(encode_jobs(bodies))
    assert list(decode_jobs(payload).items()) == list(bodies.items())


@given(jobs, st.data())
def test_answers_come_back(results, data):
    failed = [key for key in results if data.draw(st.booleans())]
    (payload,) = JobFrameReader().feed(encode_answer(results, failed))
    assert decode_answer(payload) == (results, failed)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120))
def test_garbage_is_an_answer_or_an_invalid_request(payload):
    for decode in (decode_answer, decode_jobs):
        try:
            decode(payload)
        except InvalidRequest:
            continue


def test_ready_is_an_empty_payload():  # B42
    assert list(JobFrameReader().feed(READY + READY)) == [b"", b""]
