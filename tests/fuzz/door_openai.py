# SPDX-License-Identifier: Apache-2.0
"""Fuzz of OpenAI's protocol and its neighbours: bodies that are right or nearly, streamed or not, by several clients.

The oracle is `json` and a few loops: it knows what the models say, cuts it at stop sequences and at the limit of
tokens, and lists the fields that are wrong. Whatever is refused is told in the protocol's form, and names one of them.
Some clients leave. In the end nobody is left in the models.

    .venv/bin/python -m tests.fuzz.door_openai SECONDS SEED
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.openai_forms import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    FORMS,
    MESSAGES,
    RERANK,
    RESPONSES,
    SCORE,
    WHOLE,
    Form,
    asked,
    pair_of,
    said_to,
    several,
    written,
    wrong_fields,
)
from tests.fuzz.serving import Findings, Visitor, fuzz_door, is_text
from tests.models.spoken import tokens_of

TARGET = Path(__file__).parents[1] / "models" / "spoken.py"
JSON = {"Content-Type": "application/json"}


class Choice(NamedTuple):
    """A text of an answer.

    Attributes:
        stop: The stop sequence that ended it; only Anthropic's clients are told.
    """

    text: str
    reason: str
    stop: str = ""


class Answer(NamedTuple):
    """What an answer says.

    Attributes:
        tokens: How many tokens all choices are; None if it does not say.
        likely: The tokens of each choice that came with probabilities.
    """

    choices: list[Choice]
    tokens: int | None
    likely: Sequence[str] = ()


def choice(tokens: list[str], limit: int | None, stops: list[str]) -> tuple[Choice, int]:
    """A choice, and how many tokens it was."""
    found, count = "", 0
    for token in tokens:
        if limit is not None and count >= limit:
            return Choice(found, "length"), count
        count += 1
        found += token
        places = [(found.find(stop), stop) for stop in stops if stop in found]
        if places:
            place, stop = min(places)
            return Choice(found[:place], "stop", stop), count
    return Choice(found, "length" if limit is not None and count >= limit else "stop"), count


def expected(form: Form, body: dict[str, Any]) -> Answer:
    """What an answer has to say."""
    stops = body.get("stop_sequences" if form is MESSAGES else "stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    seed, count = body.get("seed"), body.get("n") or 1
    if form is COMPLETIONS:
        found = [one for prompt in several(body["prompt"]) for one in [completed(prompt, body, stops)] * count]
    else:
        limit = body.get("max_output_tokens") or body.get("max_completion_tokens") or body.get("max_tokens")
        said = said_to(form, body)[-1]
        seeds = [0] * count if seed is None else range(seed, seed + count)  # each choice has one of its own
        found = [choice(tokens_of(said, one), limit, stops) for one in seeds]
    choices = [one if form is MESSAGES else one._replace(stop="") for one, _ in found]
    return Answer(choices, sum(tokens for _, tokens in found))


def completed(prompt: Any, body: dict[str, Any], stops: list[str]) -> tuple[Choice, int]:
    """A choice that comes whole, so that a limit finds nothing to leave out; it is two tokens all the same."""
    found, _ = choice([str(prompt)], None, stops)
    if found.text == str(prompt) and not found.stop and (body.get("max_tokens") or 3) <= 2:
        found = found._replace(reason="length")
    return found, 2


# ---------------------------------------------------------------------------------------------------------------------
# What an answer says


def whole(form: Form, told: dict[str, Any]) -> Answer:
    """Read an answer that came as one body."""
    if form is RESPONSES:
        return response(told)
    if form is MESSAGES:
        return message(told)
    choices = [
        Choice((one["message"]["content"] if form is CHAT else one["text"]), one["finish_reason"])
        for one in told["choices"]
    ]
    likely = ["".join(each["token"] for each in (one["logprobs"] or {}).get("content", ())) for one in told["choices"]]
    return Answer(choices, told["usage"]["completion_tokens"], likely)


def response(told: dict[str, Any]) -> Answer:
    ((part,),) = (item["content"] for item in told["output"])
    reasons = {"completed": "stop", "incomplete": "length"}
    assert told["incomplete_details"] == (None if told["status"] == "completed" else {"reason": "max_output_tokens"})
    usage = told["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return Answer([Choice(part["text"], reasons[told["status"]])], usage["output_tokens"])


def message(told: dict[str, Any]) -> Answer:
    (block,) = told["content"]
    reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}
    assert (told["stop_reason"] == "stop_sequence") == (told["stop_sequence"] is not None)
    found = Choice(block["text"], reasons[told["stop_reason"]], told["stop_sequence"] or "")
    return Answer([found], told["usage"]["output_tokens"])


def streamed(form: Form, data: bytes) -> Answer:
    """Put the events of an answer together."""
    *events, rest = data.split(b"\n\n")
    assert rest == b""
    if form in (CHAT, COMPLETIONS):
        assert events.pop() == b"data: [DONE]"
        return put_together([json.loads(event.removeprefix(b"data: ")) for event in events], form)
    told = [named(event) for event in events]
    return streamed_response(told) if form is RESPONSES else streamed_message(told)


def named(event: bytes) -> dict[str, Any]:
    name, _, data = event.partition(b"\ndata: ")
    told = json.loads(data)
    assert name == b"event: " + told["type"].encode()
    return told


def streamed_response(events: list[dict[str, Any]]) -> Answer:
    assert [one.pop("sequence_number") for one in events] == [*range(len(events))]
    kinds = [one["type"].removeprefix("response.") for one in events]
    deltas = kinds.count("output_text.delta")
    begin = ["created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas]
    end = ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds[:-1] == begin + end, kinds
    last = events[-1]["response"]
    assert kinds[-1] == last["status"]
    text = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    found = response(last)
    assert (
        {text}
        == {one["text"] for one in events if one["type"] == "response.output_text.done"}
        == {found.choices[0].text}
    )
    assert events[-2]["item"] == last["output"][0] | {"status": "completed"}
    assert events[0]["response"]["id"] == last["id"]
    return found


def streamed_message(events: list[dict[str, Any]]) -> Answer:
    first, opened, *deltas, closed, last, _ = events
    kinds = [one["type"] for one in events]
    begin = ["message_start", "content_block_start", *["content_block_delta"] * len(deltas)]
    assert kinds == [*begin, "content_block_stop", "message_delta", "message_stop"], kinds
    assert {one["index"] for one in (opened, *deltas, closed)} == {0}
    block = opened["content_block"] | {"text": "".join(one["delta"]["text"] for one in deltas)}
    return message(first["message"] | {"content": [block]} | last["delta"] | {"usage": last["usage"]})


def put_together(events: list[dict[str, Any]], form: Form) -> Answer:
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    likely: dict[int, str] = {}
    used = None
    for event in events:
        if event.get("usage") is not None:
            assert event["choices"] == []
            used = event["usage"]["completion_tokens"]
        for one in event["choices"]:
            index = one["index"]
            assert index not in reasons, "something comes after its end"
            texts[index] = texts.get(index, "") + ((one["delta"].get("content") or "") if form is CHAT else one["text"])
            for each in (one["logprobs"] or {}).get("content", ()):
                likely[index] = likely.get(index, "") + each["token"]
            if one["finish_reason"] is not None:
                reasons[index] = one["finish_reason"]
    assert [*sorted(texts)] == [*range(len(texts))] == [*sorted(reasons)], "a choice has no end"
    choices = [Choice(texts[index], reasons[index]) for index in range(len(texts))]
    return Answer(choices, used, [likely.get(index, "") for index in range(len(texts))])


def vectors(body: dict[str, Any], told: dict[str, Any]) -> tuple[Any, Any]:
    """The vectors of an answer with the tokens, and what they should be."""
    inputs = several(body["input"])
    wanted = [[float(len(one)), float(sum(map(ord, one)) if isinstance(one, str) else sum(one))] for one in inputs]
    found = [one["embedding"] for one in told["data"]]
    if body.get("encoding_format") == "base64":
        found = [[*struct.unpack("<2f", base64.b64decode(one))] for one in found]
    return (found, told["usage"]["prompt_tokens"]), (wanted, sum(map(len, inputs)))


def ranks(body: dict[str, Any], told: dict[str, Any]) -> tuple[Any, Any]:
    """The ranks of an answer, and what they should be."""
    documents = several(body["documents"])
    order = sorted(range(len(documents)), key=lambda at: -len(documents[at]))[: body.get("top_n") or None]
    wanted = [{"index": at, "relevance_score": float(len(documents[at]))} for at in order]
    if body.get("return_documents") is not False:
        wanted = [{**one, "document": {"text": documents[at]}} for one, at in zip(wanted, order, strict=True)]
    return told["results"], wanted


def scores(body: dict[str, Any], told: dict[str, Any]) -> tuple[Any, Any]:
    """The scores of an answer, and what they should be."""
    documents = several(body[pair_of(body)[1]])
    wanted = [{"index": at, "object": "score", "score": float(len(one))} for at, one in enumerate(documents)]
    return told["data"], wanted


COMPARED = {EMBEDDINGS.path: vectors, RERANK.path: ranks, SCORE.path: scores}


# ---------------------------------------------------------------------------------------------------------------------
# Clients


class Client(Visitor):
    """Asks, and compares."""

    def round(self) -> None:
        """One request."""
        form = self.dice.choice((CHAT, *FORMS))
        body: Any = asked(self.dice, form)
        sent = written(body, self.dice)
        try:
            body = json.loads(sent.decode())
            json.dumps(body, ensure_ascii=False).encode()  # half a letter is none
        except (ValueError, RecursionError):
            body = None
        answer = self.post(f"/v1/{form.path}", sent, JSON)
        if answer is None:
            return
        status, kind, data = answer
        if status != 200:
            self._compare_error(form, body, status, data, sent)
            return
        if not is_text(sent):
            return  # in the name of something that nobody looks at, or in a prompt behind those that are streamed
        wrong = wrong_fields(form, body) if isinstance(body, dict) else {"no object"}
        if wrong or body["model"] != form.model:
            self.findings.differ("answered, and it is wrong", form.path, wrong, sent, data)
            return
        try:
            self._compare(form, body, kind, data)
        except (AssertionError, KeyError, ValueError, TypeError) as error:
            self.findings.differ(f"an answer that cannot be read: {error!r}", form.path, data, sent)

    def _compare_error(self, form: Form, body: Any, status: int, data: bytes, sent: bytes) -> None:
        told, wrong = json.loads(data), wrong_fields(form, body) if isinstance(body, dict) else None
        differ = self.findings.differ
        error = told["error"]
        if form is MESSAGES:
            is_error = told.keys() == {"type", "error", "request_id"} and error.keys() == {"type", "message"}
            is_error = is_error and error["type"] == {400: "invalid_request_error", 404: "not_found_error"}.get(status)
        else:
            is_error = told.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
        named = error["message"] if form is MESSAGES else error["param"] or ""
        if not is_error:
            differ("an error in another form", form.path, data, sent)
        elif status == 404:
            is_known = isinstance(body, dict) and body.get("model") == form.model
            if is_known or not named.startswith("no model" if form is MESSAGES else "model"):
                differ("a model is not found", form.path, data, sent)
        elif status != 400 or (wrong is not None and not wrong):
            differ(f"status {status}", form.path, data, sent)
        elif wrong is not None and not any(
            (name in named if form is MESSAGES else named.startswith(name)) or len(name) > 100 for name in wrong
        ):
            differ(f"refused for another field than {wrong}", form.path, data, sent)

    def _compare(self, form: Form, body: dict[str, Any], kind: str, data: bytes) -> None:
        differ = self.findings.differ
        if form in WHOLE:
            found, wanted = COMPARED[form.path](body, json.loads(data))
            if found != wanted:
                differ("another answer", form.path, found, wanted, body)
            return
        wanted = expected(form, body)
        if body.get("stream"):
            assert kind.startswith("text/event-stream")
            found = streamed(form, data)
        else:
            found = whole(form, json.loads(data))
        is_counted = not body.get("stream") or form in (RESPONSES, MESSAGES)
        is_counted = is_counted or (body.get("stream_options") or {}).get("include_usage") is True
        if is_counted != (found.tokens is not None):
            differ("usage was told, or not", form.path, data, body)
        if found.choices != wanted.choices or found.tokens not in (None, wanted.tokens):
            differ("another answer", form.path, found, wanted, body)
        # Tokens are told with the text that they begin in.
        likely = zip(found.likely, found.choices, strict=True) if body.get("logprobs") and form is CHAT else ()
        if not all(one.startswith(said.text) and (said.text or not one) for one, said in likely):
            differ("other tokens than the text", form.path, found, body)


def main(seconds: float, seed: int) -> int:
    """Fuzz for a time; returns how many differences there were."""
    return fuzz_door(Findings("openai"), TARGET, (seconds, seed), Client)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
