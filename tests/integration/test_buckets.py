# SPDX-License-Identifier: Apache-2.0
"""Batch keys, padding and isolation of errors, asked for over HTTP."""

import pytest

MODEL = """
import forebay


class Tagger(forebay.Model):
    pad = forebay.Pad({"ids": ("length",)}, buckets={"lenght": [4, 8]})

    def predict(self, batch):
        return batch
"""

PLAIN = """
import forebay


class Inverse(forebay.Model):
    max_batch_size = 3
    max_wait_ms = 5_000

    def predict(self, batch):
        return [1 / sample for sample in batch]
"""


@pytest.fixture(scope="module", params=["process", "thread", "inline"])
def server(request, launch):
    return launch("buckets.py", "--worker-kind", request.param)


# Padding


def test_samples_of_a_bucket_run_together_and_are_answered_at_their_own_length(server, at_once):
    asked = [[1], [1, 2, 3], [1, 2, 3, 4, 5], list(range(8))]
    answers = at_once(*(lambda ids=ids: server.call("tagger", {"ids": ids}).json() for ids in asked))
    assert [answer["ids"] for answer in answers] == [[2 * one for one in ids] for ids in asked]
    assert [answer["shape"] for answer in answers] == [[2, 4], [2, 4], [2, 8], [2, 8]]


def test_buckets_are_those_of_what_preprocess_returns(server, at_once):  # F61
    asked = ["a", "a b", "a b c", "a b c d e"]
    answers = at_once(*(lambda text=text: server.call("tokenizer", text).json() for text in asked))
    assert answers == [[2, 2], [2, 2], [2, 8], [2, 8]]
    answers = at_once(*(lambda text=text: server.call("tokenizer", text) for text in ["a " * 9, "a", "a b", "a b c"]))
    assert [answer.status_code for answer in answers] == [422, 200, 200, 200]
    assert [answer.json() for answer in answers[1:]] == [[2, 2], [2, 2], [1, 8]]


def test_a_sample_longer_than_the_largest_bucket_is_refused_by_name(server):
    answer = server.call("tagger", {"ids": list(range(9))})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["message"] == "'ids' cannot be padded: expected length <= 8, got 9 - at `$.ids`"
    assert error["detail"] == {"path": "$.ids"}


@pytest.mark.parametrize("body, status", [(b'{"ids": ["a"]}', 422), (b'{"ids": [', 400), (b"{}", 422)])
def test_a_sample_that_has_no_key_gets_the_ordinary_answer(server, body, status):
    answer = server.client.post("/models/tagger", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["request_id"]


def test_a_pad_that_names_no_axis_of_the_model_is_told_with_its_line(cli, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    result = cli("check", path)
    assert result.returncode == 2
    assert (
        "model.py:6: Pad: buckets names the axis 'lenght', there is 'length'; did you mean 'length'?" in result.stderr
    )


# Keys


def test_rows_of_an_array_run_with_those_of_their_key(server, at_once):
    first, second = at_once(
        lambda: server.call("words", ["ant", "bee", "ape"]).json(),
        lambda: server.call("words", ["bat"]).json(),
    )
    assert [row[0] for row in first] == ["ant", first[1][0], "ant"]
    assert first[0] == first[2] == ["ant", "ape"]
    assert {one[0] for one in first[1]} == {"b"}
    assert {one[0] for one in second[0]} == {"b"}


def test_a_large_array_of_mixed_keys_is_joined_in_order(server):
    words = [f"{'abc'[number % 3]}{number}" for number in range(200)]
    answers = server.call("words", words).json()
    assert all(
        word in batch and {one[0] for one in batch} == {word[0]} for word, batch in zip(words, answers, strict=True)
    )
    assert max(map(len, answers)) <= 64


@pytest.mark.parametrize("bad, status", [("fail", 500), ("odd", 500), ("not this", 422), (5, 422)])
def test_a_key_that_fails_concerns_its_own_request(server, at_once, bad, status):
    failed, fine = at_once(lambda: server.call("words", ["ant", bad], via="a"), lambda: server.call("words", ["ant"]))
    assert (failed.status_code, fine.status_code, fine.json()) == (status, 200, [["ant"]])
    assert "dawn" not in failed.text
    if status == 422:
        assert failed.json()["error"]["message"].startswith("sample 1: ")


@pytest.mark.parametrize(
    "sample, told", [("fail", "RuntimeError: attack at dawn"), ("odd", "Words.batch_key returned a list")]
)
def test_a_key_that_fails_is_in_the_log_with_the_request_id(server, eventually, sample, told):
    assert server.call("words", [sample], x_request_id=f"key-{sample}").status_code == 500
    (record,) = eventually(lambda: [r for r in server.records if f"key-{sample}" in r.get("request_ids", [])])
    assert told in record["message"]


# Isolation


def test_the_mates_of_a_sample_that_fails_its_batch_are_answered(server, at_once, eventually):
    samples = ["a", "b", "raise", "c"]
    answers = at_once(*(lambda one=one: server.call("poisoned", one, x_request_id=f"mate-{one}") for one in samples))
    assert [answer.status_code for answer in answers] == [200, 200, 500, 200]
    assert [answer.json() for answer in answers if answer.status_code == 200] == ["a", "b", "c"]
    (record,) = eventually(lambda: [r for r in server.records if "mate-raise" in r.get("request_ids", [])])
    assert record["request_ids"] == ["mate-raise"]
    assert "attack at dawn" in record["message"]


def test_the_mates_of_a_sample_that_ends_its_worker_are_answered(serve, at_once, eventually):
    server = serve("buckets.py:Poisoned", "--worker-kind", "process", "--workers", "2")
    samples = ["a", "die", "b", "c"]
    answers = at_once(*(lambda one=one: server.call("poisoned", one) for one in samples))
    assert [answer.status_code for answer in answers] == [200, 503, 200, 200]
    assert [answer.json() for answer in answers if answer.status_code == 200] == ["a", "b", "c"]
    # One worker for the batch, one more for the sample that stands alone by then.
    eventually(lambda: server.metric("forebay_workers") == 2)
    assert server.metric("forebay_worker_restarts_total") == 2
    assert server.metric("forebay_in_flight") == 0
    answers = at_once(*(lambda one=one: server.call("poisoned", one).json() for one in "defg"))
    assert answers == list("defg")


def test_isolation_may_be_asked_for_on_the_command_line(serve, tmp_path, at_once):
    path = tmp_path / "model.py"
    path.write_text(PLAIN)
    server = serve(path, "--worker-kind", "thread", "--isolate-errors")
    answers = at_once(*(lambda one=one: server.call("inverse", one) for one in (1, 0, 2)))
    assert [answer.status_code for answer in answers] == [200, 500, 200]
