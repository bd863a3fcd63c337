# SPDX-License-Identifier: Apache-2.0
"""OpenAI's client has texts said and recordings written down."""

import json
import wave

import pytest
from tests.compat.openai_protocol.clients import KEY, PYTHON
from tests.gen_ai_times import AFTER_FIRST, DURATION, TO_FIRST, added
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no environment with OpenAI's client: make setup")
SAY = "audio.speech.create"
SAY_IN_PARTS = "audio.speech.with_streaming_response.create"
HEAR = "audio.transcriptions.create"
TEXT = "It takes 1.5 seconds"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Returns the path of a silent recording so many seconds long; 63 are more than is kept in memory."""
    folder = tmp_path_factory.mktemp("recordings")

    def made(seconds):
        path = folder / f"{seconds}.wav"
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(10_000)
            file.writeframes(bytes(round(20_000 * seconds)))
        return {"path": str(path)}

    return made


def say(text, **more):
    return {"model": "speaker", "input": text, "voice": "alloy", **more}


def test_a_text_is_said(client):
    found = client.ask(SAY, **say("to be"))["result"]
    assert found == {"type": "audio/wav", "audio": "RIFFto be "}  # the usual format of this model
    found = client.ask(SAY, **say("to be", response_format="pcm", speed=2.0, instructions="softly"))["result"]
    assert found == {"type": "audio/pcm", "audio": "to to be be "}
    for named, kind in (({}, "audio/mpeg"), ({"response_format": "opus"}, "audio/opus"), ({"speed": 2}, "audio/mpeg")):
        found = client.ask(SAY, **say("to be", model="jingle", **named))["result"]
        assert found == {"type": kind, "audio": "alloy: to be"}
    together = client.ask_all(*[(SAY, say("to", response_format=kind)) for kind in ("wav", "pcm")])
    assert [one["result"]["audio"] for one in together] == ["RIFFto ", "to "]


def test_audio_comes_in_parts_and_stops_with_its_client(client, tmp_path):
    found = client.ask(SAY_IN_PARTS, **say("to be or not"))
    assert ("".join(found["parts"]), found["type"]) == ("RIFFto be or not ", "audio/wav")
    assert client.ask(SAY, **say("", response_format="pcm"))["result"] == {"type": "audio/pcm", "audio": ""}
    found = client.ask(SAY_IN_PARTS, **say(f"hold {tmp_path / 'until'}", response_format="pcm"), take=2)
    assert found["parts"][0].startswith("0 ")
    eventually((tmp_path / "until.ended").exists)


def test_audio_that_breaks_off_is_no_whole_answer(client):
    found = client.ask(SAY_IN_PARTS, **say("to be fail"))
    assert "".join(found["parts"]) == "RIFFto be "
    assert found["error"]["class"] == "RemoteProtocolError"
    failed = client.ask(SAY_IN_PARTS, **say("fail", response_format="pcm"))["error"]
    assert (failed["status_code"], failed["type"]) == (500, "server_error")
    assert client.ask(SAY, **say("to"))["result"]["audio"] == "RIFFto "


def test_a_client_of_http_1_0_sees_audio_that_breaks_off(server):
    headers = ["content-type: application/json", f"x-api-key: {KEY}"]
    with server.connect() as wire:
        body = json.dumps(say("to be fail")).encode()
        wire.send(wire.request("POST", "/v1/audio/speech", body, headers=headers, version="1.0"))
        received = []
        with pytest.raises(ConnectionResetError):  # the end of a connection would be that of the audio
            received.extend(iter(lambda: wire.socket.recv(65536), b""))
        assert b"".join(received).endswith(b"RIFFto be ")
        body = json.dumps(say("to be")).encode()
    with server.connect() as wire:
        wire.send(wire.request("POST", "/v1/audio/speech", body, headers=headers, version="1.0"))
        assert wire.read_rest().endswith(b"RIFFto be ")


@pytest.mark.parametrize(
    "wrong, status, param, words",
    [
        ({"model": "speakr"}, 404, "model", "did you mean 'speaker'?"),
        ({"model": "words"}, 404, "model", "no model 'words' answers at /v1/audio/speech"),
        ({"response_format": "mp3"}, 400, "response_format", "`pcm`, `wav`"),
        ({"response_format": "ogg", "model": "jingle"}, 400, "response_format", "`flac`"),
        ({"speed": 9}, 400, "speed", "<= 4"),
        ({"voice": {"id": "voice_1"}}, 400, "voice", "`str`"),
        ({"stream_format": "sse"}, 400, "stream_format", "`audio`"),
        ({"extra_body": {"n": 2}}, 400, "n", "unknown field"),
        ({"input": "a" * 100_001}, 413, None, "100000 bytes"),
    ],
)
def test_what_is_wrong_with_a_text_to_say(client, wrong, status, param, words):
    error = client.ask(SAY, **(say("a") | wrong))["error"]
    assert (error["status_code"], error["param"]) == (status, param)
    assert words in error["message"]


def test_a_recording_is_written_down(client, recordings):
    asked = {"model": "listener", "file": recordings(1.5)}
    usage = {"type": "duration", "seconds": 2}
    found = client.ask(HEAR, **asked, language="en", temperature=0.2)["result"]
    assert (found["text"], found["usage"]) == (TEXT, usage)
    assert client.ask(HEAR, **asked, response_format="text")["result"] == TEXT
    found = client.ask(HEAR, **asked, response_format="srt")["result"]
    assert found == "1\n00:00:00,000 --> 00:00:00,750\nIt takes\n\n2\n00:00:00,750 --> 00:00:01,500\n1.5 seconds\n"
    found = client.ask(HEAR, **asked, response_format="vtt")["result"]
    assert found.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.750\nIt takes\n")
    kinds = ["word", "segment"]
    found = client.ask(HEAR, **asked, response_format="verbose_json", timestamp_granularities=kinds, language="en")
    found = found["result"]
    assert (found["text"], found["duration"], found["language"]) == (TEXT, 1.5, "en")
    assert [(one["id"], one["start"], one["text"]) for one in found["segments"]] == [
        (0, 0.0, "It takes"),
        (1, 0.75, " 1.5 seconds"),
    ]
    assert [one["word"] for one in found["words"]] == ["1.5", "seconds"]
    found = client.ask(HEAR, **asked, prompt="text")["result"]
    assert (found["text"], found["usage"]["output_tokens"]) == ("It takes a while", 2)


def test_a_long_recording_lies_on_disk(client, recordings):
    asked = {"model": "listener", "file": recordings(63)}
    together = client.ask_all(*[(HEAR, asked)] * 3)
    assert [one["result"]["text"] for one in together] == ["It takes 63.0 seconds"] * 3


def test_a_transcript_comes_as_events_and_stops_with_its_client(client, recordings, tmp_path):
    asked = {"model": "listener", "file": recordings(1.5), "stream": True}
    for parts in (client.ask(HEAR, **asked)["parts"], client.ask_all((HEAR, asked))[0]["parts"]):
        assert [one["type"] for one in parts] == [*["transcript.text.delta"] * 2, "transcript.text.done"]
        assert (parts[0]["delta"], parts[-1]["text"]) == ("It takes", TEXT)
    failed = client.ask(HEAR, **asked, prompt="fail")
    assert [one["delta"] for one in failed["parts"]] == ["It takes"]
    assert (failed["error"]["class"], failed["error"]["type"]) == ("APIError", "server_error")
    assert len(client.ask(HEAR, **asked, prompt=f"hold {tmp_path / 'until'}", take=3)["parts"]) == 3
    eventually((tmp_path / "until.ended").exists)


@pytest.mark.parametrize(
    "wrong, status, param, words",
    [
        ({"model": "listner"}, 404, "model", "did you mean 'listener'?"),
        ({"model": "speaker"}, 404, "model", "no model 'speaker' answers at /v1/audio/transcriptions"),
        ({"response_format": "diarized_json"}, 400, "response_format", "`verbose_json`"),
        ({"response_format": "srt", "prompt": "text"}, 400, "response_format", "tells no segments"),
        ({"temperature": 2}, 400, "temperature", "<= 1"),
        ({"timestamp_granularities": ["letter"]}, 400, "timestamp_granularities[][0]", "letter"),
        ({"include": ["logprobs"]}, 400, "include[]", "unknown field"),
        ({"file": {"path": __file__}}, 400, None, "the file is not a WAV"),
        ({"prompt": "fail"}, 500, None, "the model failed"),
    ],
)
def test_what_is_wrong_with_a_recording(client, recordings, wrong, status, param, words):
    error = client.ask(HEAR, **({"model": "listener", "file": recordings(1.5)} | wrong))["error"]
    assert (error["status_code"], error["param"]) == (status, param)
    assert words in error["message"]


def test_forms_that_are_none(client, recordings):
    def post(body, kind):
        headers = {**client.headers, "x-api-key": KEY, "content-type": kind}
        answer = client.server.client.post("/v1/audio/transcriptions", content=body, headers=headers)
        return answer.status_code, answer.json()["error"]["message"]

    assert post(b"{}", "application/json") == (
        415,
        "Content-Type: expected multipart/form-data, got 'application/json'",
    )
    field = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nlistener\r\n--b--\r\n'
    assert post(field, "multipart/form-data; boundary=b") == (400, "Object missing required field `file`")
    assert post(field[:-9], "multipart/form-data; boundary=b") == (
        400,
        "the form breaks off before its last boundary",
    )
    too_long = client.ask(HEAR, model="listener", file=recordings(101))["error"]
    assert (too_long["status_code"], "2000000 bytes" in too_long["message"]) == (413, True)


def test_opentelemetry_is_told_how_long_speech_and_transcripts_took(client, recordings):  # Issue 48
    before = {model: client.times(model) for model in ("speaker", "listener")}
    client.ask(SAY, **say("to be"))
    client.ask(SAY_IN_PARTS, **say("to be fail"))
    client.ask(HEAR, model="listener", file=recordings(1.5))
    found = {model: added(times, client.times(model)) for model, times in before.items()}
    assert {kind: count for kind, (count, _) in found["speaker"].items()} == {
        (DURATION, "speech", ""): 1,
        (DURATION, "speech", "internal"): 1,
    }
    kinds = {(what, "transcription", "") for what in (DURATION, TO_FIRST, AFTER_FIRST)}
    assert {kind: count for kind, (count, _) in found["listener"].items()} == dict.fromkeys(kinds, 1)
