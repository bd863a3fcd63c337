# SPDX-License-Identifier: Apache-2.0
"""From the body of a request to what is asked, and to the bodies of its samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, cast

import msgspec
from msgspec import Meta

from forebay.errors import ForebayError, InvalidRequest, TooLarge, ValidationError
from forebay.openai.request_fields import (
    MAX_CHOICES,
    MAX_INPUTS,
    MAX_STOPS,
    Choices,
    Stop,
    Stops,
    StreamOptions,
    Tokens,
)
from forebay.protocols import native, samples
from forebay.serving.models.sample_errors import refusal
from forebay.types.element_limits import at_once
from forebay.types.first_use import known
from forebay.types.json_elements import json_elements

if TYPE_CHECKING:
    from forebay.types.tenant import Tenant

CHAT: Final = "chat/completions"
COMPLETIONS: Final = "completions"
RESPONSES: Final = "responses"
MESSAGES: Final = "messages"
EMBEDDINGS: Final = "embeddings"
RERANK: Final = "rerank"
SCORE: Final = "score"
MAX_COPIED_BYTES: Final = 1 << 25
"""What the samples of one request may have together where they repeat each other."""
MAX_STOP_BYTES: Final = 1 << 16
"""Longest `stop`, with room for each character to be escaped."""
MAX_MEMBERS: Final = 20_000
"""Names in a body that is said anew for each of its samples."""
MAX_CHECKED_BYTES: Final = 1 << 18
"""Longest body of several prompts that is looked at before its stream begins; of longer ones the worker tells."""

_T = TypeVar("_T")
_TIERS: Final = {b'"priority"': 0, b'"default"': 1, b'"flex"': 2}
"""The classes that tiers of service wish for."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the server must know of a request; what it says to the model is read by the worker."""

    model: str
    n: Choices | None = None
    stop: msgspec.Raw = msgspec.Raw()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    text_2: msgspec.Raw = msgspec.Raw()
    encoding_format: str | None = None
    service_tier: msgspec.Raw = msgspec.Raw()
    response_format: msgspec.Raw = msgspec.Raw()

    def in_class(self, tenant: Tenant) -> Tenant:
        """Return a tenant in the class that the request wishes for; the model's contract tells what is not a tier."""
        wish = _TIERS.get(bytes(self.service_tier))
        return tenant if wish is None else tenant.wishing(wish)

    @property
    def choices(self) -> int:
        """How many answers each prompt is to get."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        """Where answers end."""
        if len(memoryview(self.stop)) == 0:
            return []
        found = _stops.decode(b'{"stop":%b}' % bytes(self.stop)).stop
        return [found] if isinstance(found, str) else list(found or ())

    @property
    def limit(self) -> int | None:
        """The most tokens of a choice."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def pair(self) -> tuple[str, str]:
        """The fields with the two sides of scores: vLLM has had other names for them, too."""
        is_older = len(memoryview(self.queries)) == 0
        return ("text_1", "text_2") if is_older else ("queries", "documents")

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def is_base64(self) -> bool:
        """Whether vectors are wanted in base64."""
        return self.encoding_format == "base64"


class _Stops(msgspec.Struct, frozen=True):
    """Where answers end, on its own: how long it is has to be known before anything is made of it."""

    stop: Stop | Stops | None


class _Several(msgspec.Struct, frozen=True):
    """A body with several prompts."""

    prompt: list[str | Tokens]


class Ranking(msgspec.Struct, frozen=True):
    """How ranks are to be told; of `top_n` 0 is as good as nothing, as with vLLM."""

    documents: msgspec.Raw = msgspec.Raw()
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None


RANKING: Final = msgspec.json.Decoder(known(Ranking))
_stops: Final = msgspec.json.Decoder(known(_Stops))
_several: Final = msgspec.json.Decoder(known(_Several))
_asked: Final = msgspec.json.Decoder(known(Asked))
FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LAST_SEED: Final = 2**63 - 1
_DIGITS: Final = {b"%d" % digit for digit in range(10)} | {b"-"}


def read(body: bytes) -> Asked:
    """Read what a body asks.

    Raises:
        InvalidRequest: If it cannot be read; ValidationError if something in it is wrong.
    """
    try:
        asked = _asked.decode(body)
        if len(memoryview(asked.stop)) > MAX_STOP_BYTES:
            raise invalid("stop", f"is longer than {MAX_STOPS} texts may be")
        _ = asked.stops
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(error, body) from None
    if asked.stream_options is not None and not asked.stream:
        raise invalid("stream_options", "is for streams, and 'stream' is not true")
    return asked


def samples_of(path: str, asked: Asked, body: bytes) -> list[bytes]:
    """Return the bodies of the samples: one for each choice of each prompt, for each text, or for each pair of texts.

    Raises:
        InvalidRequest: If there is none, or what there is cannot be read.
        TooLarge: If there are too many.
    """
    if path == CHAT:
        found = [body]
    elif path == COMPLETIONS:
        prompts = _each("prompt", asked.prompt, MAX_CHOICES)
        if prompts is not None and len(prompts) * asked.choices > MAX_CHOICES:
            msg = f"'n' is {asked.choices} with {len(prompts)} prompts: expected at most {MAX_CHOICES} choices"
            raise TooLarge(f"{msg} in one request", detail={"path": "$.n"})
        if asked.stream and prompts is not None and len(body) <= MAX_CHECKED_BYTES:
            decoded(_several, body)  # all, as the status of a stream cannot be another one later
        found = [body] if prompts is None else _with_each(body, ["prompt"], [_member("prompt", one) for one in prompts])
    elif path == RERANK:
        decoded(RANKING, body)
        documents = [_member("document", one) for one in _list("documents", asked)]
        return _with_each(body, ["documents", "top_n", "return_documents"], documents, ["document"])
    elif path == SCORE:
        return _with_each(body, asked.pair, _pairs(asked), ["query", "document"])
    else:
        if asked.encoding_format not in {None, "float", "base64"}:
            raise invalid("encoding_format", f"must be 'float' or 'base64', got {asked.encoding_format!r:.100}")
        inputs = _each("input", asked.input, MAX_INPUTS)
        inputs = [bytes(asked.input)] if inputs is None else inputs
        return _with_each(body, ["input", "encoding_format"], [_member("input", one) for one in inputs])
    if asked.choices > 1 and sum(map(len, found)) * asked.choices > MAX_COPIED_BYTES:
        msg = f"'n' is {asked.choices}: expected at most {MAX_COPIED_BYTES} bytes of prompts times choices, got more"
        raise TooLarge(msg, detail={"path": "$.n"})
    return [sample for one in found for sample in _choices(asked, one)]


def _choices(asked: Asked, body: bytes) -> list[bytes]:
    """Return the body of each choice of a prompt; a model that honours the seed makes the same of the same one."""
    try:
        seed = int(bytes(asked.seed)) if asked.choices > 1 else None
    except ValueError:  # there is none; or the worker says that it is none
        seed = None
    if seed is None:
        return [body] * asked.choices
    step = 1 if seed < _LAST_SEED - asked.choices else -1
    return _with_each(body, ["seed"], [_member("seed", b"%d" % (seed + step * one)) for one in range(asked.choices)])


def _list(name: str, asked: Asked) -> list[bytes]:
    """Return the elements of a field that has one text or several, and no tokens."""
    given: msgspec.Raw = getattr(asked, name)
    found = _each(name, given, MAX_INPUTS, has_tokens=False)
    return [bytes(given)] if found is None else found


def _pairs(asked: Asked) -> list[bytes]:
    """Return the members of each sample of a request for scores: one text with each of several, or pair by pair."""
    first, second = asked.pair
    queries, documents = _list(first, asked), _list(second, asked)
    if len(queries) not in {1, len(documents)}:
        has = f"has {len(queries)} texts and '{second}' has {len(documents)}"
        raise invalid(first, f"{has}; give one, or as many as there are in '{second}'")
    if len(queries) == 1:
        if len(queries[0]) * len(documents) > MAX_COPIED_BYTES:
            raise TooLarge(f"'{first}' is too long to be said for each of {len(documents)} texts")
        queries *= len(documents)
    return [b'"query":%b,"document":%b' % pair for pair in zip(queries, documents, strict=True)]


def too_many(path: str, asked: Asked, samples: int, limit: int) -> TooLarge:
    """Return the error of a request that has more samples than may ever wait: it need not come again."""
    is_text = path in {CHAT, COMPLETIONS}
    name = "n" if is_text and asked.choices > 1 else [*_varied(path, asked).values()][-1]
    made = "choices" if is_text else "texts"
    msg = f"{samples} {made} are asked for, and the model's queue takes {limit} (max_queue); ask for fewer at a time"
    return TooLarge(msg, detail={"path": f"$.{name}"})


def placed(error: ForebayError, path: str, asked: Asked, number: int) -> ForebayError:
    """Return the error of a sample with its place among several, as `input[1]`; it calls tokens so."""
    if path == CHAT or type(error) is not ValidationError:
        return error
    detail = cast("dict[str, Any]", error.detail) if isinstance(error.detail, dict) else {}
    inside = str(detail.get("path"))
    for field, name in _varied(path, asked).items():
        wrong, place, message = f"$.{field}", f"$.{name}", error.message
        if not inside.startswith(wrong):
            continue
        given = bytes(getattr(asked, name))
        if given[:1] == b"[" and (path in {RERANK, SCORE} or given[1:].lstrip()[:1] not in _DIGITS):
            place += f"[{number // (asked.choices if path == COMPLETIONS else 1)}]"
        if inside == wrong and message.startswith("Expected `str`, got `array`"):
            message += "; an array here is the tokens of a text, and this model takes texts only"
        return ValidationError(message.replace(wrong, place), detail={"path": inside.replace(wrong, place, 1)})
    return error


def _varied(path: str, asked: Asked) -> dict[str, str]:
    """Return the fields in which the samples of a request differ, with what its body calls them."""
    return {
        RERANK: {"document": "documents"},
        SCORE: {"query": asked.pair[0], "document": asked.pair[1]},
        EMBEDDINGS: {"input": "input"},
    }.get(path, {"prompt": "prompt"})


def _each(name: str, given: msgspec.Raw, limit: int, *, has_tokens: bool = True) -> list[bytes] | None:
    """Return the elements of a field that may have several texts; None if it is one text, or the tokens of one."""
    written = bytes(given)
    if not written:
        raise invalid(name, "is missing")
    if written[:1] != b"[" or (has_tokens and written[1:].lstrip()[:1] in _DIGITS):
        return None  # the worker says so if it is not
    try:
        return [bytes(one) for one in samples.samples_of(written, native.PARAMS["json", "json"], limit)]
    except TooLarge:
        msg = f"'{name}' has more than {limit} elements, which is as many as are taken at a time"
        raise TooLarge(msg, detail={"path": f"$.{name}"}) from None
    except ValidationError:
        raise invalid(name, "is empty") from None


def decoded(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Read a body.

    Raises:
        InvalidRequest: If it is something else.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(error, body) from None


def _member(name: str, value: bytes) -> bytes:
    return b'"%b":%b' % (name.encode(), value)


def _with_each(body: bytes, names: Sequence[str], members: Sequence[bytes], foreign: Sequence[str] = ()) -> list[bytes]:
    """Return the body with each of these members in place of some fields.

    Raises:
        InvalidRequest: If it has foreign fields, which only samples have.
        TooLarge: If it has too many fields for that.
    """
    at_once(json_elements(body, len(body), MAX_MEMBERS, "a body of several samples"))
    fields: dict[str, Any] = decoded(FIELDS, body)
    _refuse(foreign, fields, "is a field of samples, and none of a request")
    for name in (*names, *foreign):
        fields.pop(name, None)
    beside = msgspec.json.encode(fields)  # with the names of fields, which may be what is long
    if len(beside) * len(members) > MAX_COPIED_BYTES:
        msg = f"'{names[0]}': the other fields are too long to repeat for each of its {len(members)} elements"
        raise TooLarge(msg)
    begin = beside[:-1] + (b"," if fields else b"")
    return [b"%b%b}" % (begin, member) for member in members]


def as_chat(
    path: str, fields: Mapping[str, Any], foreign: Iterable[str], own: Collection[str], found: Mapping[str, Any]
) -> bytes:
    """Write the body of a chat that was asked for in another form.

    Args:
        path: Where that form is asked.
        fields: Its body; what is not `own` stands in a chat as well.
        foreign: Fields of chats that it has other names for.
        own: Its own fields.
        found: What these are in a chat; None is left out.

    Raises:
        InvalidRequest: If it has foreign fields.
    """
    _refuse(foreign, fields, f"is a field of /v1/chat/completions, and none of {path}")
    kept = {name: value for name, value in fields.items() if name not in own}
    return msgspec.json.encode(kept | {name: value for name, value in found.items() if value is not None})


def _refuse(foreign: Iterable[str], fields: Mapping[str, Any], why: str) -> None:
    for name in foreign:
        if bytes(fields.get(name, b"null")) != b"null":
            raise invalid(name, why)


def invalid(name: str, why: str) -> InvalidRequest:
    """Return the error of a field."""
    return ValidationError(f"'{name}' {why}", detail={"path": f"$.{name}"})
