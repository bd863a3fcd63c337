# SPDX-License-Identifier: Apache-2.0
"""The codec of OpenAI's protocol: samples of a body, texts of parts, vectors."""

import base64
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.errors import BadOutcome, InvalidRequest, QueueFull, TooLarge, Unavailable
from forebay.openai import Embedding, FunctionCall, Logprob, TextPart, TimedText, ToolCall, Transcript
from forebay.protocols.openai import audio, joined_results, openai_errors, request_reading
from forebay.protocols.openai.request_reading import CHAT, COMPLETIONS, EMBEDDINGS
from forebay.protocols.openai.texts import DONE, Choice, Cut, Texts
from forebay.serving.models.named import named
from forebay.serving.models.vectors import vector_in_base64
from forebay.types.call import Media
from forebay.types.file import FormPart
from forebay.types.tenant import TenantConfig, Tenants

encode = msgspec.json.encode


def samples(path, **body):
    written = encode({"model": "m", **body})
    return [
        msgspec.json.decode(one) for one in request_reading.samples_of(path, request_reading.read(written), written)
    ]


def texts(path=CHAT, **body):
    return Texts(path, request_reading.read(encode({"model": "m", **body})), "1", 5)


def test_a_body_becomes_as_many_samples_as_choices_prompts_and_texts():
    body = encode({"model": "m", "messages": [], "n": 3})
    assert request_reading.samples_of(CHAT, request_reading.read(body), body) == [body] * 3
    assert [one["prompt"] for one in samples(COMPLETIONS, prompt=["a", [1, 2]], n=2)] == ["a", "a", [1, 2], [1, 2]]
    assert samples(EMBEDDINGS, input=["a,b", "]"], encoding_format="base64", other=1) == [
        {"model": "m", "other": 1, "input": "a,b"},
        {"model": "m", "other": 1, "input": "]"},
    ]
    assert [one["input"] for one in samples(EMBEDDINGS, input=[[1], [2, 3]])] == [[1], [2, 3]]
    assert [one["input"] for one in samples(EMBEDDINGS, input=[*range(5000)])] == [[*range(5000)]]


def test_each_choice_of_a_prompt_has_a_seed_of_its_own():
    assert [one["seed"] for one in samples(CHAT, messages=[], n=3, seed=-1)] == [-1, 0, 1]
    found = samples(COMPLETIONS, prompt=["a", "b"], n=2, seed=7)
    assert [(one["prompt"], one["seed"]) for one in found] == [("a", 7), ("a", 8), ("b", 7), ("b", 8)]
    for said in ({"n": 2}, {"n": 2, "seed": None}, {"n": 2, "seed": 1.5}, {"seed": 5}):  # nothing to count on from
        assert samples(CHAT, messages=[], **said) == [{"model": "m", "messages": [], **said}] * said.get("n", 1)


def test_a_field_without_a_name_is_not_lost_on_the_way_to_the_worker():
    assert samples(COMPLETIONS, prompt=["a", "b"], **{"": 1}) == [{"model": "m", "": 1, "prompt": one} for one in "ab"]


def test_what_is_repeated_for_each_text_counts_with_the_names_of_its_fields():
    body = encode({"model": "m", "input": ["a"] * 2048, "k" * 20_000: 1})
    with pytest.raises(TooLarge, match="too long to repeat for each"):
        request_reading.samples_of(EMBEDDINGS, request_reading.read(body), body)


def test_names_that_are_no_text_are_refused_before_samples_are_made_of_them():
    body = b'{"model":"m","input":["a"],"\xff":1}'
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        request_reading.samples_of(EMBEDDINGS, request_reading.read(body), body)


@pytest.mark.parametrize(
    "path, body, error",
    [
        (COMPLETIONS, {"prompt": []}, InvalidRequest),
        (COMPLETIONS, {}, InvalidRequest),
        (EMBEDDINGS, {"input": []}, InvalidRequest),
        (EMBEDDINGS, {"input": ["a"] * 2049}, TooLarge),
        (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, TooLarge),
        # What is repeated for each sample must not grow without bounds.
        (EMBEDDINGS, {"input": ["a"] * 2000, "user": "x" * 100_000}, TooLarge),
        (COMPLETIONS, {"prompt": "x" * 1_000_000, "n": 100}, TooLarge),
    ],
)
def test_too_many_or_no_samples(path, body, error):
    with pytest.raises(error):
        samples(path, **body)


def test_too_many_choices_are_told_by_what_makes_them_so_many():
    with pytest.raises(TooLarge, match="'n' is 65 with 2 prompts: expected at most 128 choices") as raised:
        samples(COMPLETIONS, prompt=["a", "b"], n=65)
    assert msgspec.json.decode(openai_errors.body_of(raised.value))["error"]["param"] == "n"
    assert len(samples(COMPLETIONS, prompt=["a", "b"], n=64)) == 128
    with pytest.raises(TooLarge, match="'prompt' has more than 128 elements"):
        samples(COMPLETIONS, prompt=["a"] * 129, n=2)
    with pytest.raises(InvalidRequest, match="128"):
        samples(COMPLETIONS, prompt="a", n=129)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"{}", b'{"model":3}', b'{"model":"\xff"}', b"[" * 5000])
def test_bodies_that_cannot_be_read(body):
    with pytest.raises(InvalidRequest):
        request_reading.read(body)


@given(st.lists(st.text("ab€", max_size=4), max_size=8), st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3))
def test_a_text_is_cut_before_the_first_stop_sequence_however_it_comes(pieces, stops):
    cut, found = Cut(stops), ""
    for piece in pieces:
        found += cut.take(piece)
        if cut.is_over:
            break
    # The first that is complete ends the text; what came with it may have another one before.
    ended = next((n for n in range(len(pieces) + 1) if any(stop in "".join(pieces[:n]) for stop in stops)), None)
    assert cut.is_over == (ended is not None)
    text = "".join(pieces[:ended])
    if ended is not None:
        text = text[: min(text.find(stop) for stop in stops if stop in text)]
    assert found + cut.rest() == text


def test_what_cannot_become_a_stop_sequence_is_not_held_back():
    cut = Cut(["END", "###"])
    assert [cut.take(piece) for piece in ("a#", "#", "b", "EN", "E", "ND!")] == ["a", "", "##b", "", "EN", ""]
    assert cut.is_over
    assert cut.rest() == ""


def test_a_choice_counts_tokens_and_says_why_it_ended():
    choice = Choice([], 3)
    assert [choice.take(encode(part), is_whole=False) for part in ("a", TextPart("b", prompt_tokens=7), "c")] == [
        *"abc"
    ]
    assert choice.take(encode(TextPart("", tokens=0)), is_whole=False) == ""
    assert not choice.is_over
    assert choice.take(encode("d"), is_whole=False) == ""
    assert choice.is_over
    assert (choice.end(), choice.finish_reason, choice.tokens, choice.prompt_tokens) == ("", "length", 3, 7)
    choice = Choice([], 3)
    choice.take(encode(TextPart("whole", tokens=3, finish_reason="stop")), is_whole=True)
    choice.end()
    assert choice.finish_reason == "stop"
    for wrong in (3, ["a"], {"text": 3}, None):
        with pytest.raises(BadOutcome):
            Choice([], None).take(encode(wrong), is_whole=True)


@given(
    st.lists(st.lists(st.text("ab€", max_size=3), max_size=4), max_size=6),
    st.sampled_from([[], ["ab"], ["b€", "aa"]]),
    st.none() | st.integers(1, 3),
)
@example([["b"], ["c"]], ["bc"], 1)  # what was held back is told although something came behind it
def test_tokens_are_told_with_the_text_that_they_begin_in(pieces, stops, limit):
    choice, text, told = Choice(stops, limit), "", []
    for tokens in pieces:
        part = TextPart("".join(tokens), logprobs=[Logprob(one, -1.0) for one in tokens])
        text += choice.take(encode(part), is_whole=False)
        assert all(at < max(len(text), 1) for at, _ in choice.logprobs)
        told += choice.logprobs
        choice.logprobs = []
        if choice.is_over:
            break
    text += choice.end()
    told += choice.logprobs
    expected, at = [], 0
    for token in (token for tokens in pieces[:limit] for token in tokens):
        expected.append((at, token))
        at += len(token)
    if choice.is_over and choice.finish_reason == "stop":  # what begins where the text was cut has gone with the rest
        expected = [(at, token) for at, token in expected if at < len(text)]
    assert [(at, one.token) for at, one in told] == expected


def test_calls_of_tools_are_put_together_and_told_in_pieces():
    choice = texts().choice()
    call = ToolCall(function=FunctionCall("rain", "{"))
    for part in (
        TextPart("a"),
        TextPart(tool_calls=[call]),
        TextPart(tool_calls=[ToolCall(function=FunctionCall(arguments="}"))]),
    ):
        choice.take(encode(part), is_whole=False)
    (whole,) = choice.calls
    assert whole["function"] == {"name": "rain", "arguments": "{}"}
    assert [one["function"].get("arguments") for one in choice.news] == ["{", "}"]
    assert choice.news[0]["id"] == whole["id"]
    assert (choice.end(), choice.finish_reason) == ("", "tool_calls")
    for wrong, path in ((ToolCall(function=FunctionCall(arguments="}")), CHAT), (call, COMPLETIONS)):
        with pytest.raises(BadOutcome, match="the call of a tool"):
            texts(path).choice().take(encode(TextPart(tool_calls=[wrong])), is_whole=True)


def events(written):
    return [
        msgspec.json.decode(one.removeprefix(b"data: ")) for one in written.split(b"\n\n")[:-1] if b"[DONE]" not in one
    ]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_has_the_text_and_then_the_usage(path):
    stream = texts(path, stream=True, stream_options={"include_usage": True}, n=2)
    one, two = stream.choice(), stream.choice()
    written = stream.event(0, one, one.take(encode('"é\n'), is_whole=False)) + stream.last_event(0, one, one.end())
    written += stream.last_event(1, two, "b") + stream.end([one, two])
    assert written.endswith(DONE)
    found = events(written)
    assert found[-1]["usage"] == {"prompt_tokens": 0, "completion_tokens": 1, "total_tokens": 1}
    for index, text in enumerate(['"é\n', "b"]):
        choices = [choice for event in found for choice in event["choices"] if choice["index"] == index]
        told = [choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices]
        assert "".join(told) == text
        assert choices[-1]["finish_reason"] is not None or index == 1


def test_vectors_are_written_in_base64_as_32_bits():
    for value in ([1.5, -2.0], np.array([1.5, -2.0]), np.array([1.5, -2.0], np.float16), (1.5, -2)):
        assert struct.unpack("<2f", base64.b64decode(msgspec.json.decode(vector_in_base64(value)))) == (1.5, -2.0)
    counted = msgspec.json.decode(vector_in_base64(Embedding(np.array([1.5]), 4)))
    assert counted["tokens"] == 4
    asked = request_reading.read(b'{"model":"m","encoding_format":"base64"}')
    written, tokens = joined_results.embedded(
        asked, "", 0, b"", [vector_in_base64([1.5]), vector_in_base64(Embedding([2.0], 4))]
    )
    found = msgspec.json.decode(written)
    assert (tokens, found["usage"]) == (4, {"prompt_tokens": 4, "total_tokens": 4})
    assert len(found["data"]) == 2
    for wrong in (b"3", b'{"tokens":1}', b"[1]", b"null"):
        with pytest.raises(BadOutcome):
            joined_results.embedded(asked, "", 0, b"", [wrong])


@pytest.mark.parametrize(
    "error, status, kind, code",
    [
        (InvalidRequest("a"), 400, "invalid_request_error", "invalid_argument"),
        (QueueFull("a"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (Unavailable("a"), 503, "server_error", "unavailable"),
        (BadOutcome("a secret"), 500, "server_error", "internal"),
    ],
)
def test_errors_have_a_type_and_a_code(error, status, kind, code):
    found = msgspec.json.decode(openai_errors.body_of(error))["error"]
    assert (openai_errors.status_of(error), found["type"], found["code"], found["param"]) == (status, kind, code, None)
    assert "secret" not in found["message"]
    assert (
        msgspec.json.decode(openai_errors.body_of(InvalidRequest("\ud800")))["error"]["type"] == "invalid_request_error"
    )


def test_a_tier_of_service_is_a_class_and_none_above_that_of_the_key():
    tenant = Tenants({"one": TenantConfig(tier=1)}).of("one")
    for tier, found in {"priority": 1, "default": 1, "flex": 2, "auto": 1, "scale": 1, 7: 1, None: 1}.items():
        asked = request_reading.read(encode({"model": "m", "service_tier": tier}))
        assert asked.in_class(tenant).tier == found
    assert request_reading.read(b'{"model": "m"}').in_class(tenant) is tenant


@pytest.mark.parametrize(
    "seconds, told",
    [
        *((0.0, "00:00:00,000"), (11.54, "00:00:11,540"), (0.9995, "00:00:01,000"), (59.9996, "00:01:00,000")),
        *((3599.9996, "01:00:00,000"), (3661.2, "01:01:01,200"), (1e7, "2777:46:40,000")),
    ],
)
def test_times_of_subtitles_are_rounded_and_carried(seconds, told):
    asked = request_reading.read(b'{"model":"m","response_format":"srt"}')
    answer = audio.TranscriptAnswer(asked, "id", 0, b"")
    choice = answer.choice()
    choice.texts.append(choice.take(encode(Transcript("a", segments=[TimedText(0, seconds, "a\n\nb")])), is_whole=True))
    written = answer.whole([choice])
    assert isinstance(written, Media)
    assert written.body.decode() == f"1\n00:00:00,000 --> {told}\na b\n"


@pytest.mark.parametrize("seconds", ["-1", "1e8", "null", '"1"'])
def test_times_that_are_none_are_the_models_fault(seconds):
    choice = Choice([], None)
    with pytest.raises(BadOutcome):
        choice.take(b'{"text":"a","segments":[{"start":%b,"end":1,"text":"a"}]}' % seconds.encode(), is_whole=True)


@pytest.mark.parametrize(
    "said, kind",
    [
        (b'"response_format":"mp3"', "audio/mpeg"),
        (b'"response_format":"pcm"', "audio/pcm"),
        (b'"response_format":"a\\r\\nb"', "audio/*"),
        (b'"response_format":{"type":"wav"}', "audio/*"),
        (b'"response_format":null', "audio/wav"),
        (b'"user":"a"', "audio/wav"),
    ],
)
def test_audio_is_of_the_type_that_was_asked_for(said, kind):
    asked = request_reading.read(b'{"model":"m",%b}' % said)
    assert audio.audio_of(asked, b"RIFF....WAVE").type == kind


def test_of_a_form_the_server_reads_three_fields():
    parts = [FormPart("model", b"m"), FormPart("prompt", b"p" * 100), FormPart("stream", b"True")]
    file = FormPart("model", b"/a/path", filename="model", size=10)
    assert msgspec.json.decode(audio.form_body(named([*parts, file]))) == {"model": "m", "stream": True}
    assert msgspec.json.decode(audio.form_body(named([FormPart("model", b"\xff")]))) == {
        "model": "\ufffd",
        "stream": False,
    }
