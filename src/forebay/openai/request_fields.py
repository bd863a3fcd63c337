# SPDX-License-Identifier: Apache-2.0
"""What clients of OpenAI's protocol ask, as the samples of models: its fields, and which values they may have."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, field

from forebay.types.file import File

MAX_CHOICES = 128
"""Choices of one request: `n` for each of its prompts."""
MAX_INPUTS = 2048
"""Texts of one request for embeddings or scores."""
MAX_STOPS = 16
"""Stop sequences of one request."""

Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
Tokens = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
_Granularities = tuple[Literal["word", "segment"], ...]
_Limit = Annotated[int, Meta(ge=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Temperature = Annotated[float, Meta(ge=0, le=2)]


class FunctionTool(Struct, frozen=True, kw_only=True):
    """What a model may call.

    Attributes:
        name: Of the function.
        description: When to call it, and how.
        parameters: JSON Schema of the object that it takes.
        strict: Whether arguments have to follow the schema to the letter.
    """

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True):
    """One of the tools that a client offers.

    Attributes:
        type: There is no other kind.
    """

    function: FunctionTool
    type: Literal["function"]


class _ToolName(Struct, frozen=True):
    name: str


class NamedTool(Struct, frozen=True, kw_only=True):
    """The tool that a client wants to be called.

    Attributes:
        function: Its name.
        type: There is no other kind.
    """

    function: _ToolName
    type: Literal["function"]


class FunctionCall(Struct, frozen=True, omit_defaults=True):
    """What is to be called.

    Attributes:
        name: Of the function.
        arguments: The object that it is given, in JSON as the model wrote it.
    """

    name: str = ""
    arguments: str = ""


class ToolCall(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call that a model asks for; in a stream it may come in pieces.

    Attributes:
        function: What to call. A piece without its name goes on with the arguments of the call before.
        id: How the client names it when it answers; made up where a model leaves it out.
        type: There is no other kind.
    """

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class Message(Struct, frozen=True, kw_only=True):
    """One message of a conversation.

    Attributes:
        role: Who speaks.
        content: What is said: a text, or pieces of texts, pictures and the like as the client wrote them.
        name: Of the speaker.
        tool_calls: What an assistant asked for.
        tool_call_id: Which of these calls a tool answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """What is said in words."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(piece.get("text", "")) for piece in self.content or () if piece.get("type") == "text")


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stream is to be told.

    Attributes:
        include_usage: Whether a last event counts the tokens.
        include_obfuscation: Of the original; nothing is hidden here.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class AnyRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all requests have; nothing of it is for the model."""

    model: str = ""
    user: str | None = None
    metadata: dict[str, Any] | None = None


class _TextRequest(AnyRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for texts. The server itself sees to `n`, `stop`, `stream` and, at the latest, the limit of tokens."""

    max_tokens: _Limit | None = None
    temperature: _Temperature | None = None
    top_p: _Share | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Stop | Stops | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def stops(self) -> list[str]:
        """The texts before which an answer ends; the server cuts there."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class ChatRequest(_TextRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation to go on with; a model answers with texts or with objects of `TextPart`.

    Attributes:
        messages: What was said.
        max_completion_tokens: The newer name of `max_tokens`; see `limit`.
    """

    openai: ClassVar[str] = "chat/completions"

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Limit | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens that are wanted; None leaves that to the model."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(_TextRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text to go on with; of several prompts in one request each is a sample.

    Attributes:
        prompt: A text, or its tokens.
    """

    openai: ClassVar[str] = "completions"

    prompt: str | Tokens

    @property
    def limit(self) -> int | None:
        """The most tokens that are wanted; None leaves that to the model."""
        return self.max_tokens


class EmbeddingRequest(AnyRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text whose vector is wanted: a list of numbers, an array or an `Embedding`. Of several each is a sample.

    Attributes:
        input: The text, or its tokens. A model of texts only says so: `class Text(EmbeddingRequest): input: str`.
    """

    openai: ClassVar[str] = "embeddings"

    input: str | Tokens


class RerankRequest(AnyRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How well a document fits a query: a number or a `Score`. Of several documents each is a sample.

    Attributes:
        query: What is looked for; of `/score` the first text.
        document: Where it may be found; of `/score` the second text.
    """

    openai: ClassVar[str] = "rerank"

    query: str
    document: str


class SpeechRequest(AnyRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text to say; the result is audio in the `response_format`, as `bytes`, whole or the parts of a stream."""

    openai: ClassVar[str] = "audio/speech"

    input: str
    voice: str
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "mp3"
    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0
    instructions: str | None = None
    stream_format: Literal["audio"] = "audio"


class TranscriptionRequest(AnyRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recording to write down; the result is a text or a `Transcript`. The server sees to `response_format`."""

    openai: ClassVar[str] = "audio/transcriptions"

    file: File
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: _Share | None = None
    timestamp_granularities: _Granularities = field(default=(), name="timestamp_granularities[]")
    stream: bool | None = None
