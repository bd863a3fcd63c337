# SPDX-License-Identifier: Apache-2.0
"""Fuzz of OpenAI's protocol: bodies that are right or nearly, streamed or not, by several clients, some of which leave.

The oracle is `json` and a few loops: it knows what the models say, cuts it at stop sequences and at the limit of
tokens, and lists the fields that are wrong. Whatever is refused is told in the protocol's form, and names one of them.
In the end nobody is left in the models.

    .venv/bin/python -m tests.fuzz.door_openai SECONDS SEED
"""

from __future__ import annotations

import base64
import json
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from tests.fuzz.patience import HANG_S, awake
from tests.fuzz.serving import Findings, Running, Sender, is_text, pick, running
from tests.models.spoken import tokens_of

TARGET = Path(__file__).parents[1] / "models" / "spoken.py"
ODD = (None, True, 0, -1, 1.5, 10**30, "", "x", [], [None], {}, {"x": 1})
CHAT, COMPLETIONS, EMBEDDINGS, RERANK = "chat/completions", "completions", "embeddings", "rerank"
MODELS = {CHAT: "spoken", COMPLETIONS: "written", EMBEDDINGS: "measured", RERANK: "ranked"}
WHOLE = (EMBEDDINGS, RERANK)
ROLES = ("system", "developer", "user", "assistant", "tool")


def text(dice: random.Random, longest: int = 30) -> str:
    return "".join(dice.choice('aab b,"\\\n€😀é') for _ in range(dice.randint(0, longest)))


def asked(dice: random.Random, path: str) -> dict[str, Any]:
    """What a body says, right or nearly."""
    body: dict[str, Any] = {"model": pick(dice, MODELS[path], "other", MODELS[EMBEDDINGS], *ODD[:5])}
    if path == CHAT:
        body["messages"] = [{"role": dice.choice(ROLES), "content": text(dice)} for _ in range(dice.randint(1, 3))]
        if dice.random() < 0.1:
            odd: Any = dice.choice(({"role": "x"}, {}, None, {"role": "user", "content": 3}, {"content": ""}))
            body["messages"][-1] = odd
        if dice.random() < 0.3:
            body["logprobs"] = pick(dice, True, False, 1, "yes")
        if dice.random() < 0.2:
            body["max_completion_tokens"] = pick(dice, dice.randint(1, 9), None, 0, 1.5, "1")
    elif path == RERANK:
        body["query"] = pick(dice, text(dice), *ODD)
        documents = [pick(dice, text(dice, 9), 3, None) for _ in range(dice.randint(1, 4))]
        body["documents"] = pick(dice, documents, "x", [], 3)
        if dice.random() < 0.5:
            body["top_n"] = pick(dice, dice.randint(0, 5), None, -1, 1.5, "1")
        if dice.random() < 0.3:
            body["return_documents"] = pick(dice, True, False, None, 1)
    else:
        one = lambda: dice.choice((text(dice, 9), [dice.randrange(50) for _ in range(dice.randint(1, 4))]))  # noqa: E731
        several = lambda: [one() for _ in range(dice.randint(1, 4))]  # noqa: E731
        body["prompt" if path == COMPLETIONS else "input"] = pick(
            dice, one() if dice.random() < 0.5 else several(), *ODD
        )
    if path in WHOLE:
        if path == EMBEDDINGS and dice.random() < 0.4:
            body["encoding_format"] = pick(dice, "float", "base64", "base64", "int8", *ODD[:4])
    else:
        if dice.random() < 0.4:
            body["n"] = pick(dice, dice.randint(1, 4), None, 0, 129, "2", 1.5, True, 2**70)
        if dice.random() < 0.5:
            stops = [dice.choice(("a", "ab", "b ", "€", "😀", "é\n", "bb", "a,")) for _ in range(dice.randint(1, 3))]
            body["stop"] = pick(
                dice, stops[0] if dice.random() < 0.5 else stops, None, [], "", [""], ["a"] * 17, 3, "x" * 257
            )
        if dice.random() < 0.5:
            body["stream"] = pick(dice, True, False, None, 1, "true")
        if dice.random() < 0.3:
            body["stream_options"] = pick(dice, {"include_usage": True}, {}, None, {"include_usage": 1}, {"x": 1}, [])
        if dice.random() < 0.4:
            body["max_tokens"] = pick(dice, dice.randint(1, 9), None, 0, -1, 1.5, "3")
        if dice.random() < 0.3:
            body["seed"] = pick(dice, dice.randint(0, 9), None, 1.5, "x")
        if dice.random() < 0.2:
            body["temperature"] = pick(dice, 0.5, 2, 2.5, -1, "x", None)
    if dice.random() < 0.05:
        body[dice.choice(("surprise", "tools", "top_q"))] = dice.choice(ODD)
    if dice.random() < 0.03:
        body.pop(dice.choice([*body]))
    return body


def is_whole(value: Any, least: int = -(2**63), most: int = 2**63 - 1) -> bool:
    return type(value) is int and least <= value <= most


def is_prompt(value: Any) -> bool:
    """Whether it is a text, or the tokens of one."""
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(is_whole(one, 0) for one in value)
    )


def is_stop(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= 256


def is_message(one: Any) -> bool:
    return isinstance(one, dict) and one.get("role") in ROLES and isinstance(one.get("content"), str | None)


def optional(check: Any) -> Any:
    return lambda value: value is None or check(value)


CHECKS = {
    "messages": lambda value: isinstance(value, list) and bool(value) and all(map(is_message, value)),
    "logprobs": lambda value: type(value) is bool,
    "prompt": lambda value: (
        is_prompt(value) or (isinstance(value, list) and bool(value) and all(map(is_prompt, value)))
    ),
    "encoding_format": lambda value: value in (None, "float", "base64"),
    "n": optional(lambda value: is_whole(value, 1, 128)),
    "stop": optional(
        lambda value: is_stop(value) or (isinstance(value, list) and len(value) <= 16 and all(map(is_stop, value)))
    ),
    "stream": optional(lambda value: type(value) is bool),
    "stream_options": optional(
        lambda value: value in ({}, {"include_usage": True}) and not any(type(one) is int for one in value.values())
    ),
    "max_tokens": optional(lambda value: is_whole(value, 1)),
    "max_completion_tokens": optional(lambda value: is_whole(value, 1)),
    "seed": optional(is_whole),
    "temperature": optional(lambda value: type(value) in (int, float) and 0 <= value <= 2),
}
CHECKS["input"] = CHECKS["prompt"]
CHECKS["query"] = lambda value: isinstance(value, str)
CHECKS["documents"] = lambda value: (
    isinstance(value, str) or (isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value))
)
CHECKS["top_n"] = optional(lambda value: is_whole(value, 0))
CHECKS["return_documents"] = CHECKS["stream"]
TAKEN = {
    CHAT: {"messages", "logprobs", "max_completion_tokens"},
    COMPLETIONS: {"prompt"},
    EMBEDDINGS: {"input", "encoding_format"},
    RERANK: {"query", "documents", "top_n", "return_documents"},
}
TEXTS = {"n", "stop", "stream", "stream_options", "max_tokens", "seed", "temperature"}
NEEDED = {CHAT: "messages", COMPLETIONS: "prompt", EMBEDDINGS: "input", RERANK: "query"}


def wrong_fields(path: str, body: dict[str, Any]) -> set[str]:
    """The names of the fields that are wrong."""
    taken = TAKEN[path] | (TEXTS if path not in WHOLE else set())
    found = {name for name, value in body.items() if name in taken and not CHECKS[name](value)}
    # One that is not taken, and is null, says nothing.
    found |= {name for name, value in body.items() if name not in taken and name != "model" and value is not None}
    if NEEDED[path] not in body:
        found.add(NEEDED[path])
    if path == RERANK and "documents" not in body:
        found.add("documents")
    if not isinstance(body.get("model"), str):
        found.add("model")
    if body.get("stream_options") is not None and body.get("stream") is not True:
        found.add("stream_options")
    return found


def choice(tokens: list[str], body: dict[str, Any]) -> tuple[str, str, int]:
    """The text of a choice, why it ended, and how many tokens it was."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    found, count = "", 0
    for token in tokens:
        if limit is not None and count >= limit:
            return found, "length", count
        count += 1
        found += token
        places = [found.find(stop) for stop in stops if stop in found]
        if places:
            return found[: min(places)], "stop", count
    return found, "length" if limit is not None and count >= limit else "stop", count


def expected(path: str, body: dict[str, Any]) -> tuple[list[tuple[str, str]], int]:
    """The choices of an answer, and how many tokens they are."""
    if path == CHAT:
        content = body["messages"][-1].get("content") or ""
        count, seed = body.get("n") or 1, body.get("seed")
        seeds = [0] * count if seed is None else range(seed, seed + count)  # each choice has one of its own
        found = [choice(tokens_of(content, one), body) for one in seeds]
    else:
        prompts = body["prompt"]
        prompts = prompts if isinstance(prompts, list) and not is_prompt(prompts) else [prompts]
        found = []
        for prompt in prompts:
            # It is whole, so that a limit finds nothing to leave out; it is two tokens all the same.
            told, reason, _ = choice([str(prompt)], {**body, "max_tokens": None})
            if reason != "stop" or told == str(prompt):
                reason = "length" if told == str(prompt) and (body.get("max_tokens") or 3) <= 2 else "stop"
            found += [(told, reason, 2)] * (body.get("n") or 1)
    return [(told, reason) for told, reason, _ in found], sum(count for *_, count in found)


def put_together(events: list[dict[str, Any]], path: str) -> tuple[list[tuple[str, str]], int | None, list[str]]:
    """The choices of a stream, its tokens if it told them, and the tokens that came with probabilities."""
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
            texts[index] = texts.get(index, "") + ((one["delta"].get("content") or "") if path == CHAT else one["text"])
            for each in (one["logprobs"] or {}).get("content", ()):
                likely[index] = likely.get(index, "") + each["token"]
            if one["finish_reason"] is not None:
                reasons[index] = one["finish_reason"]
    assert [*sorted(texts)] == [*range(len(texts))] == [*sorted(reasons)], "a choice has no end"
    return (
        [(texts[index], reasons[index]) for index in range(len(texts))],
        used,
        [likely.get(index, "") for index in range(len(texts))],
    )


class Client:
    """Asks, and compares."""

    def __init__(self, findings: Findings, port: int, dice: random.Random) -> None:
        self._findings, self._dice = findings, dice
        self._sender = Sender(port, dice)

    def close(self) -> None:
        """Close the connection."""
        self._sender.leave()

    def round(self) -> None:
        """One request."""
        dice, differ = self._dice, self._findings.differ
        path = dice.choice((CHAT, CHAT, COMPLETIONS, EMBEDDINGS, RERANK))
        body = asked(dice, path)
        sent = json.dumps(body, ensure_ascii=dice.random() < 0.5).encode()
        if dice.random() < 0.05:
            at = dice.randrange(len(sent))
            sent = sent[:at] + dice.choice((b"", b"\xff", b"[" * 3000, b'"', b"}", b"\x00")) + sent[at + 1 :]
            try:
                body = json.loads(sent.decode())
                json.dumps(body, ensure_ascii=False).encode()  # half a letter is none
            except (ValueError, RecursionError):
                body = None
        answer = self._sender.post(f"/v1/{path}", sent, {"Content-Type": "application/json"})
        if dice.random() < 0.05:
            answer.read(dice.randrange(200))
            self._sender.leave()
            self._findings.counts["left"] += 1
            return
        data = answer.read()
        self._findings.counts[str(answer.status)] += 1
        if answer.status != 200:
            error = json.loads(data)["error"]
            wrong = None if not isinstance(body, dict) else wrong_fields(path, body)
            is_known = isinstance(body, dict) and body.get("model") == MODELS[path]
            if error.keys() != {"message", "type", "param", "code"}:
                differ("an error in another form", data, sent)
            elif answer.status == 404:
                if is_known or error["param"] != "model":
                    differ("a model is not found", data, sent)
            elif answer.status != 400 or (wrong is not None and not wrong):
                differ(f"status {answer.status}", data, sent)
            elif wrong is not None and not any(
                (error["param"] or "").startswith(name) or len(name) > 100 for name in wrong
            ):
                differ(f"refused for another field than {wrong}", data, sent)
            return
        if not is_text(sent):
            return  # in the name of something that nobody looks at, or in a prompt behind those that are streamed
        if not isinstance(body, dict) or wrong_fields(path, body) or body["model"] != MODELS[path]:
            differ(
                "answered, and it is wrong", wrong_fields(path, body) if isinstance(body, dict) else body, sent, data
            )
            return
        try:
            self._compare(path, body, answer.headers["content-type"], data)
        except (AssertionError, KeyError, ValueError, TypeError) as error:
            differ(f"an answer that cannot be read: {error!r}", data, sent)

    def _compare(self, path: str, body: dict[str, Any], kind: str, data: bytes) -> None:
        differ = self._findings.differ
        if path == EMBEDDINGS:
            inputs = (
                body["input"] if isinstance(body["input"], list) and not is_prompt(body["input"]) else [body["input"]]
            )
            wanted = [
                [float(len(one)), float(sum(map(ord, one)) if isinstance(one, str) else sum(one))] for one in inputs
            ]
            found = json.loads(data)
            vectors = [one["embedding"] for one in found["data"]]
            if body.get("encoding_format") == "base64":
                vectors = [[*struct.unpack("<2f", base64.b64decode(one))] for one in vectors]
            if vectors != wanted or found["usage"]["prompt_tokens"] != sum(map(len, inputs)):
                differ("other vectors", data, wanted, body)
            return
        if path == RERANK:
            documents = [body["documents"]] if isinstance(body["documents"], str) else body["documents"]
            ranks = sorted(range(len(documents)), key=lambda at: -len(documents[at]))[: body.get("top_n") or None]
            told = [{"index": at, "relevance_score": float(len(documents[at]))} for at in ranks]
            if body.get("return_documents") is not False:
                told = [{**one, "document": {"text": documents[at]}} for one, at in zip(told, ranks, strict=True)]
            if json.loads(data)["results"] != told:
                differ("other ranks", data, told, body)
            return
        choices, tokens = expected(path, body)
        if body.get("stream"):
            assert kind.startswith("text/event-stream")
            *events, last, rest = data.split(b"\n\n")
            assert (last, rest) == (b"data: [DONE]", b"")
            told = [json.loads(event.removeprefix(b"data: ")) for event in events]
            found, used, likely = put_together(told, path)
            if ((body.get("stream_options") or {}).get("include_usage") is True) != (used is not None):
                differ("usage was told, or not", data, body)
        else:
            answer = json.loads(data)
            found = [
                ((one["message"]["content"] if path == CHAT else one["text"]), one["finish_reason"])
                for one in answer["choices"]
            ]
            likely = [
                "".join(each["token"] for each in (one["logprobs"] or {}).get("content", ()))
                for one in answer["choices"]
            ]
            used = answer["usage"]["completion_tokens"]
        if found != choices or used not in (None, tokens):
            differ("another answer", found, choices, used, tokens, body)
        # Tokens are told with the text that they begin in.
        if body.get("logprobs") and not all(
            one.startswith(said) and (said or not one) for one, (said, _) in zip(likely, found, strict=True)
        ):
            differ("other tokens than the text", likely, found, body)


def is_empty(server: Running) -> bool:
    """Whether nobody is left in the models."""
    models = httpx.get(f"http://127.0.0.1:{server.ports['http']}/models").json()["models"]
    return not any(one["in_flight"] or one["waiting"] for one in models)


def main(seconds: float, seed: int) -> int:
    """Fuzz for a time; returns how many differences there were."""
    findings = Findings("openai")
    with running(str(TARGET)) as server:
        findings.run(seconds, seed, lambda dice: Client(findings, server.ports["http"], dice))
        end = awake() + HANG_S
        while not is_empty(server):
            if awake() > end:
                findings.differ("somebody is left in a model")
                break
            time.sleep(0.05)
    return findings.end(server)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
