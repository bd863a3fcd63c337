# SPDX-License-Identifier: Apache-2.0
"""Bodies that are right or nearly, in each form that models of OpenAI's protocol are asked in, and their faults.

Nothing here is shared with the server: a field is a function that makes values, and one that knows the right ones.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.fuzz.serving import pick

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection

ODD = (None, True, 0, -1, 1.5, 10**30, "", "x", [], [None], {}, {"x": 1})
ROLES = ("system", "developer", "user", "assistant", "tool")
SPEAKERS = ROLES[:4]


class Field(NamedTuple):
    """A field of a body.

    Attributes:
        share: How many bodies have it; all where it has to be there.
        make: Makes a value, right or wrong.
        is_right: Whether a value is right.
    """

    share: float
    make: Callable[[random.Random], Any]
    is_right: Callable[[Any], bool]


class Form(NamedTuple):
    """One way to ask.

    Attributes:
        path: Where, below `/v1`.
        model: Which of the models of `spoken.py` answers.
        fields: What a body has beside its model.
        more: Fields that nobody takes, or that are of other forms; null says nothing.
    """

    path: str
    model: str
    fields: dict[str, Field]
    more: Collection[str] = ()


def text(dice: random.Random, longest: int = 30) -> str:
    return "".join(dice.choice('aab b,"\\\n€😀é') for _ in range(dice.randint(0, longest)))


# ---------------------------------------------------------------------------------------------------------------------
# Which values are right


def is_whole(value: Any, least: int = -(2**63), most: int = 2**63 - 1) -> bool:
    return type(value) is int and least <= value <= most


def is_limit(value: Any) -> bool:
    return is_whole(value, 1)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_prompt(value: Any) -> bool:
    """Whether it is a text, or the tokens of one."""
    return is_text(value) or (isinstance(value, list) and bool(value) and all(is_whole(one, 0) for one in value))


def is_stop(value: Any) -> bool:
    return is_text(value) and 1 <= len(value) <= 256


def is_temperature(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 2


def is_options(value: Any) -> bool:
    return value in ({}, {"include_usage": True}) and not any(type(one) is int for one in value.values())


def optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def some(check: Callable[[Any], bool], least: int = 1, most: int = 10**9) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(check, value))


def either(*checks: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(check(value) for check in checks)


def among(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(one) and value == one for one in values)


def is_message(one: Any) -> bool:
    return is_object(one) and one.get("role") in ROLES and isinstance(one.get("content"), str | None)


def is_pieces(value: Any) -> bool:
    return is_text(value) or some(is_object, 0)(value)


def is_item(one: Any) -> bool:
    """Whether it is one of what `/v1/responses` is asked with; whatever kind it is, all members have their types."""
    if not is_object(one) or one.get("type", "message") not in ("message", "function_call", "function_call_output"):
        return False
    texts = all(is_text(one.get(name, "")) for name in ("call_id", "name", "arguments"))
    pieces = is_pieces(one.get("content", "")) and is_pieces(one.get("output", ""))
    return texts and pieces and one.get("role", "user") in SPEAKERS


def is_turn(one: Any) -> bool:
    """Whether it is one of what `/v1/messages` is asked with."""
    if not is_object(one) or one.get("role") not in ("user", "assistant") or not is_pieces(one.get("content")):
        return False
    pieces = one["content"] if isinstance(one["content"], list) else []
    return all(map(is_turns_piece, pieces))


def is_turns_piece(piece: Any) -> bool:
    if piece.get("type") == "tool_use":
        return is_text(piece.get("id")) and is_text(piece.get("name"))
    if piece.get("type") == "tool_result":
        return optional(is_text)(piece.get("tool_use_id")) and optional(is_pieces)(piece.get("content"))
    return True


def is_plain_text(value: Any) -> bool:
    """Whether it asks for texts as they are."""
    return is_object(value) and value.get("verbosity") is None and value.get("format") in (None, {"type": "text"})


# ---------------------------------------------------------------------------------------------------------------------
# Values


def messages(dice: random.Random) -> Any:
    found: list[Any] = [{"role": dice.choice(ROLES), "content": text(dice)} for _ in range(dice.randint(1, 3))]
    if dice.random() < 0.1:
        found[-1] = dice.choice(({"role": "x"}, {}, None, {"role": "user", "content": 3}, {"content": ""}))
    return found


def pieces(dice: random.Random, kind: str) -> Any:
    """A text, or pieces of one with something between them."""
    if dice.random() < 0.5:
        return text(dice)
    found: list[Any] = [{"type": kind, "text": text(dice, 9)} for _ in range(dice.randint(0, 3))]
    if dice.random() < 0.2:
        found.insert(dice.randint(0, len(found)), dice.choice(({"type": "image", "url": "a"}, {}, {"text": "b"})))
    return pick(dice, found, found, found, found, [3], 3)


def items(dice: random.Random) -> Any:
    if dice.random() < 0.4:
        return pick(dice, text(dice), *ODD)

    def one() -> Any:
        kind = dice.random()
        if kind < 0.15:
            return {"type": "function_call", "call_id": "c", "name": "f", "arguments": pick(dice, "{}", "x", 3)}
        if kind < 0.3:
            return {"type": "function_call_output", "call_id": "c", "output": pieces(dice, "input_text")}
        role = pick(dice, dice.choice(SPEAKERS), "tool", None, 3)
        said = {"role": role, "content": pieces(dice, dice.choice(("input_text", "output_text", "text")))}
        return pick(dice, said, {**said, "type": "message"}, {**said, "type": "x"}, {"id": "a"}, None)

    return [one() for _ in range(dice.randint(1, 3))]


def turns(dice: random.Random) -> Any:
    def piece() -> Any:
        kind = dice.random()
        if kind < 0.25:
            told = {"type": "tool_result", "tool_use_id": "a", "content": pieces(dice, "text")}
            return pick(dice, told, {"type": "tool_result"}, {**told, "tool_use_id": 3}, {**told, "content": None})
        if kind < 0.4:
            asked = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": [1]}}
            return pick(dice, asked, {**asked, "id": None}, {"type": "tool_use", "id": "a", "name": "f"})
        return pick(dice, {"type": "text", "text": text(dice, 9)}, {"type": "image"}, {}, {"type": "text"})

    def one() -> Any:
        content = text(dice) if dice.random() < 0.5 else [piece() for _ in range(dice.randint(0, 3))]
        said = {"role": dice.choice(("user", "assistant")), "content": content}
        return pick(dice, said, said, said, {**said, "role": "system"}, {"role": "user"}, None, {**said, "content": 3})

    return pick(dice, [one() for _ in range(dice.randint(1, 3))], [], None, "x")


def stops(dice: random.Random) -> Any:
    found = [dice.choice(("a", "ab", "b ", "€", "😀", "é\n", "bb", "a,")) for _ in range(dice.randint(1, 3))]
    return pick(dice, found, None, [], [""], ["a"] * 17, 3, ["x" * 257])


def stop(dice: random.Random) -> Any:
    found = stops(dice)
    return pick(dice, found[0], "", "x" * 257) if isinstance(found, list) and found and dice.random() < 0.5 else found


def prompts(dice: random.Random) -> Any:
    def one() -> Any:
        return dice.choice((text(dice, 9), [dice.randrange(50) for _ in range(dice.randint(1, 4))]))

    return pick(dice, one() if dice.random() < 0.5 else [one() for _ in range(dice.randint(1, 4))], *ODD)


def texts(dice: random.Random) -> Any:
    several = [pick(dice, text(dice, 9), 3, None) for _ in range(dice.randint(1, 4))]
    return pick(dice, several, "x", [], 3, [3])


def one_of(*values: Any, least: int = 1, most: int = 9) -> Callable[[random.Random], Any]:
    """Make whole numbers most of the time, and these else."""
    return lambda dice: pick(dice, dice.randint(least, most), *values)


def of(usual: Any, *others: Any) -> Callable[[random.Random], Any]:
    return lambda dice: pick(dice, usual, *others)


def any_of(*values: Any) -> Callable[[random.Random], Any]:
    return lambda dice: dice.choice(values)


# ---------------------------------------------------------------------------------------------------------------------
# Forms

is_prompts = either(is_prompt, some(is_prompt))
is_texts = either(is_text, some(is_text))
TEXTS = {
    "stream": Field(0.5, of(True, False, None, 1, "true"), optional(lambda value: type(value) is bool)),
    "seed": Field(0.3, one_of(None, 1.5, "x", least=0), optional(is_whole)),
    "temperature": Field(0.2, of(0.5, 2, 2.5, -1, "x", None), optional(is_temperature)),
    "stop": Field(0.5, stop, optional(either(is_stop, some(is_stop, 0, 16)))),
    "stream_options": Field(
        0.2, of({"include_usage": True}, {}, None, {"include_usage": 1}, {"x": 1}, []), optional(is_options)
    ),
}
LIMIT = Field(0.3, one_of(None, 0, -1, 1.5, "3"), optional(is_limit))
CHOICES = {
    "n": Field(0.4, one_of(None, 0, 129, "2", 1.5, True, 2**70, most=4), optional(lambda n: is_whole(n, 1, 128)))
}
LOGPROBS = {"logprobs": Field(0.3, of(True, False, 1, "yes"), lambda value: type(value) is bool)}
METADATA = {"metadata": Field(0.1, of({"a": "b"}, {}, None, 3, []), optional(is_object))}
ALWAYS = 1.0

CHAT = Form(
    "chat/completions",
    "spoken",
    {
        "messages": Field(ALWAYS, messages, some(is_message)),
        "max_tokens": LIMIT,
        "max_completion_tokens": LIMIT,
        **(TEXTS | CHOICES | LOGPROBS),
    },
    ("tools", "surprise", "top_q"),
)
COMPLETIONS = Form(
    "completions",
    "written",
    {"prompt": Field(ALWAYS, prompts, is_prompts), "max_tokens": LIMIT, **TEXTS, **CHOICES},
    ("tools", "surprise", "top_q"),
)
EMBEDDINGS = Form(
    "embeddings",
    "measured",
    {
        "input": Field(ALWAYS, prompts, is_prompts),
        "encoding_format": Field(
            0.4, of("float", "base64", "base64", "int8", *ODD[:4]), optional(among("float", "base64"))
        ),
    },
    ("dimensions", "surprise"),
)
RERANK = Form(
    "rerank",
    "ranked",
    {
        "query": Field(ALWAYS, lambda dice: pick(dice, text(dice), *ODD), is_text),
        "documents": Field(ALWAYS, texts, is_texts),
        "top_n": Field(0.5, one_of(None, -1, 1.5, "1", least=0, most=5), optional(lambda value: is_whole(value, 0))),
        "return_documents": Field(0.3, of(True, False, None, 1), optional(lambda value: type(value) is bool)),
    },
    ("rank_fields", "surprise"),
)
SCORE = Form(
    "score",
    "ranked",
    {"text_1": Field(ALWAYS, texts, is_texts), "text_2": Field(ALWAYS, texts, is_texts)},
    ("encoding", "surprise", "query"),
)
OLDER = {"text_1": "queries", "text_2": "documents"}
"""What the fields of scores were called once."""
RESPONSES = Form(
    "responses",
    "spoken",
    {
        "input": Field(ALWAYS, items, either(is_text, some(is_item))),
        "instructions": Field(0.3, of("Be brief.", "", None, 3), optional(is_text)),
        "max_output_tokens": LIMIT,
        "tools": Field(0.05, any_of([], None, [{"type": "function", "name": "f"}], {}), optional(among([]))),
        "tool_choice": Field(
            0.05, any_of("auto", "none", None, {"type": "function", "name": "f"}), optional(among("auto"))
        ),
        "include": Field(0.05, any_of([], None, ["x"], {}), optional(among([]))),
        "truncation": Field(0.05, any_of("disabled", None, "auto", 3), optional(among("disabled"))),
        "background": Field(0.05, any_of(False, None, True, 0), optional(among(False))),
        "text": Field(
            0.1,
            any_of(
                {"format": {"type": "text"}}, {}, None, {"verbosity": "low"}, 3, {"format": {"type": "json_object"}}
            ),
            optional(is_plain_text),
        ),
        "reasoning": Field(
            0.05,
            any_of({}, None, {"effort": "low"}, 3),
            optional(lambda value: is_object(value) and not value.get("effort")),
        ),
        **(TEXTS | LOGPROBS | METADATA),
    },
    ("previous_response_id", "conversation", "prompt", "messages", "max_tokens", "n", "response_format", "surprise"),
)
MESSAGES = Form(
    "messages",
    "spoken",
    {
        "messages": Field(ALWAYS, turns, some(is_turn)),
        "max_tokens": Field(ALWAYS, one_of(None, 0, -1, 1.5, "3", most=30), is_limit),
        "system": Field(0.3, lambda dice: pick(dice, pieces(dice, "text"), None, ""), optional(is_pieces)),
        "stop_sequences": Field(0.5, stops, optional(some(is_stop, 0, 16))),
        "tools": Field(0.05, any_of([], None, [{"name": "f", "input_schema": {}}], {}), optional(among([]))),
        "tool_choice": Field(
            0.1,
            any_of({"type": "auto"}, None, {"type": "any"}, {"type": "none"}, "auto"),
            optional(among({"type": "auto"})),
        ),
        "thinking": Field(
            0.05, any_of({"type": "disabled"}, None, {"type": "enabled"}), optional(among({"type": "disabled"}))
        ),
        **{name: TEXTS[name] for name in ("stream", "seed", "temperature")},
        **(LOGPROBS | METADATA),
    },
    ("top_k", "stop", "n", "stream_options", "max_completion_tokens", "surprise"),
)
FORMS = (CHAT, COMPLETIONS, EMBEDDINGS, RERANK, SCORE, RESPONSES, MESSAGES)
WHOLE = (EMBEDDINGS, RERANK, SCORE)

CALLED = {
    "input": ("input", "messages"),
    "text": ("text", "response_format", "verbosity"),
    "reasoning": ("reasoning",),
    "system": ("system", "messages"),
}
"""What errors call fields, where they may call them something else."""


def asked(dice: random.Random, form: Form) -> dict[str, Any]:
    """What a body says, right or nearly."""
    body: dict[str, Any] = {"model": pick(dice, form.model, "other", EMBEDDINGS.model, *ODD[:5])}
    body |= {name: field.make(dice) for name, field in form.fields.items() if dice.random() < field.share}
    if form is SCORE and dice.random() < 0.3:
        body = {OLDER.get(name, name): value for name, value in body.items()}
    if dice.random() < 0.05:
        body[dice.choice([*form.more])] = dice.choice(ODD)
    if dice.random() < 0.03:
        body.pop(dice.choice([*body]))
    return body


def pair_of(body: dict[str, Any]) -> tuple[str, str]:
    """The fields with the two sides of scores."""
    return ("queries", "documents") if "queries" in body else ("text_1", "text_2")


def fields_of(form: Form, body: dict[str, Any]) -> dict[str, Field]:
    if form is not SCORE:
        return form.fields
    return dict(zip(pair_of(body), form.fields.values(), strict=True))


def wrong_fields(form: Form, body: dict[str, Any]) -> set[str]:
    """The names of the fields that are wrong, as errors may call them."""
    fields = fields_of(form, body)
    found = {name for name, field in fields.items() if name in body and not field.is_right(body[name])}
    found |= {name for name, field in fields.items() if name not in body and field.share == ALWAYS}
    # One that is not taken, and is null, says nothing.
    found |= {name for name, value in body.items() if name not in fields and name != "model" and value is not None}
    if not is_text(body.get("model")):
        found.add("model")
    if "stream_options" in fields and body.get("stream_options") is not None and body.get("stream") is not True:
        found.add("stream_options")
    if form is SCORE and body.keys() >= fields.keys():
        queries, documents = (len(several(body[name])) for name in fields)
        found |= {pair_of(body)[0]} if queries not in {1, documents} else set()
    if form is MESSAGES and not {"messages", "system"} & found and not said_to(form, body):
        found.add("messages")
    return {called for name in found for called in CALLED.get(name, (name,))}


def several(value: Any) -> list[Any]:
    """The elements of a field that may have one text, or several."""
    return value if isinstance(value, list) and not is_prompt(value) else [value]


# ---------------------------------------------------------------------------------------------------------------------
# What is said to a model


def words(content: Any) -> str:
    """The text of a content."""
    if not isinstance(content, list):
        return content or ""
    texts = ("input_text", "output_text", "text")
    return "".join(one.get("text", "") for one in content if one.get("type") in texts)


def said_to(form: Form, body: dict[str, Any]) -> list[str]:
    """The texts of the messages that a model is given."""
    if form is CHAT:
        return [words(one.get("content")) for one in body["messages"]]
    if form is RESPONSES:
        return said_by_items(body["input"])
    found = [words(body["system"])] if body.get("system") else []
    for turn in body["messages"]:
        content = turn["content"]
        if isinstance(content, str):
            found.append(content)
            continue
        found += [words(one.get("content")) for one in content if one.get("type") == "tool_result"]
        rest = [one for one in content if one.get("type") != "tool_result"]
        found += [words(rest)] if rest else []
    return found


def said_by_items(given: Any) -> list[str]:
    if isinstance(given, str):
        return [given]
    found: list[tuple[str, str]] = []
    for one in given:
        kind = one.get("type", "message")
        if kind == "message":
            found.append((one.get("role", "user"), words(one.get("content"))))
        elif kind == "function_call_output":
            found.append(("tool", words(one.get("output"))))
        elif not found or found[-1][0] != "assistant":  # else it is a call of the message before
            found.append(("assistant", ""))
    return [said for _, said in found]


def written(body: dict[str, Any], dice: random.Random) -> bytes:
    """A body as it is sent, with a fault in its bytes now and then."""
    sent = json.dumps(body, ensure_ascii=dice.random() < 0.5).encode()
    if dice.random() < 0.05:
        at = dice.randrange(len(sent))
        sent = sent[:at] + dice.choice((b"", b"\xff", b"[" * 3000, b'"', b"}", b"\x00")) + sent[at + 1 :]
    return sent
