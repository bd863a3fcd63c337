# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions` and the other doors of OpenAI's protocol: the models that say so.

The body of a request names its model and may ask for several samples. So a route stands before the endpoints of all
models of a path: it submits each sample to the endpoint of the model, as a request of its own among all others, and
makes one answer of what comes back. Both lanes take this route as they take any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from forebay.batching.queue import BatchConfig
from forebay.errors import Code, ForebayError, NotFound, QueueFull
from forebay.observe.logs.request_ids import next_id
from forebay.observe.metrics.gen_ai_families import AFTER_FIRST, DURATION, TO_FIRST, histogram_of
from forebay.observe.traces import timeline
from forebay.protocols.native import FORM_TYPE, JSON_TYPE, PARAMS, Contract, UnsupportedMedia, unread_type
from forebay.protocols.openai import openai_errors, request_reading
from forebay.protocols.openai.answer_blocks import BlockAnswer
from forebay.protocols.openai.audio import SPEECH, TRANSCRIPTS, audio_of
from forebay.protocols.openai.doors import DOORS, Door
from forebay.protocols.openai.joined_results import JOINED
from forebay.protocols.openai.request_reading import CHAT, COMPLETIONS, Asked
from forebay.protocols.openai.texts import COST, Choice, Texts
from forebay.server import tfserving_facts
from forebay.server.served import Served, StandIn
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.models.further_methods import CALL
from forebay.transports.http.error_answers import error_headers
from forebay.transports.http.head import NEVER, Head
from forebay.transports.http.route import Route
from forebay.types.call import Failure, Outcome, Request, bare, nothing
from forebay.types.context import PARAM, told
from forebay.types.did_you_mean import listed, nearest
from forebay.types.json_elements import json_elements

if TYPE_CHECKING:
    from forebay.server.app import App
    from forebay.server.config import HttpConfig
    from forebay.transports.http.forms_and_gzip import Staging
    from forebay.types.batch import EntryBatch
    from forebay.types.element_limits import Steps
    from forebay.types.tenant import Tenant

OPERATIONS: Final = {CHAT: "chat", COMPLETIONS: "text_completion", SPEECH: "speech", TRANSCRIPTS: "transcription"}
"""What OpenTelemetry calls what is asked; it has the same word for embeddings, and none for rerank and audio."""


def targets_of(app: App, config: HttpConfig, staging: Staging) -> dict[str, Route]:
    """Return the routes of the paths that models say they are asked at."""
    routes: dict[str, Route] = {}
    for door in DOORS:
        models = OpenAiModels(app, door)
        if models.names:
            routes |= dict.fromkeys(door.targets, _OpenAiRoute(models, config, staging))
    return routes


def fault(error: ForebayError, request_id: str, path: str = "") -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of an answer that is an error, in the form of a path or of one above it."""
    above = next((door for door in DOORS for target in door.targets if f"{path}/".startswith(f"{target}/")), None)
    door = above or DOORS[0]
    request_id = request_id or next_id()
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    return openai_errors.status_of(error), headers + error_headers(error), door.error_body(error, request_id)


def unspoken(path: str) -> str | None:
    """Return why nothing is served at a path of the protocol; None if it is none of these."""
    kind = next((door.sample for door in DOORS if path in door.targets), None)
    return kind and f"no model here answers at {path}; models whose samples are of the type `forebay.openai.{kind}` do"


def model_page(app: App, name: str, created: int) -> dict[str, Any]:
    """Describe a model to clients of OpenAI's protocol if it speaks that, otherwise to those of TensorFlow Serving.

    Both ask at the same path, and clients of TensorFlow Serving refuse members that their messages do not have.

    Raises:
        NotFound: If there is none of that name.
    """
    if name in names(app):
        return _card(name, created)
    return {"model_version_status": tfserving_facts.statuses(app, name)}


def models_page(app: App, created: int) -> dict[str, Any]:
    """List the models: as `data` those that speak OpenAI's protocol, as `models` all, for clients of KServe's."""
    return {"object": "list", "data": [_card(name, created) for name in names(app)], "models": list(app.served)}


def names(app: App) -> list[str]:
    """Return the names of the models that speak OpenAI's protocol."""
    return list(dict.fromkeys(name for door in DOORS for name in OpenAiModels(app, door).names))


def _card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "forebay"}


class OpenAiModels:
    """The models that are asked at one path, in the form of an endpoint, as far as routes need one.

    Attributes:
        door: Where they are asked.
        path: What it is called.
        name: What the log calls who answers: the model, while it replies.
        answering: The batch whose requests are being replied to right now.
    """

    places = None  # a body is read here before it is clear who answers it

    def __init__(self, app: App, door: Door) -> None:
        self.door = door
        self.path = self.name = door.path
        self._operation = OPERATIONS.get(door.spoken, door.spoken)
        self.answering: EntryBatch | None = None
        self._app = app
        self._contracts: dict[str, dict[Served, Contract]] = {}
        self._calls: dict[Request, _Call] = {}
        for name in app.served:
            versions = app.versions(name)
            for version in versions.weights:
                one = versions.ready[version]
                contract = next((each for each in one.contracts.values() if each.openai == door.spoken), None)
                if contract is not None:
                    self._contracts.setdefault(name, {})[one] = contract
        each = [one.endpoint for speaking in self._contracts.values() for one in speaking]
        self._only = each[0] if len(each) == 1 else None
        longest_s = max((endpoint.config.max_timeout_s for endpoint in each), default=0.0)
        self.config = EndpointConfig(name=door.path, max_timeout_s=longest_s)
        self.batching = BatchConfig(max_size=1)

    @property
    def names(self) -> list[str]:
        """The names of the models."""
        return list(self._contracts)

    @property
    def contract(self) -> Contract:
        """How bytes are moved, whichever of them is asked."""
        found = [contract for one in self._contracts.values() for contract in one.values()]
        return Contract(
            streams=self.path not in JOINED,
            raw_output=self.path == SPEECH,
            has_context=any(one.has_context for one in found),
            shares_disk=all(one.shares_disk for one in found),
            is_named=self.path == TRANSCRIPTS,
            call=self.path,
            openai=self.path,
        )

    def is_full(self) -> bool:
        """Tell whether whatever is submitted now is refused; of several models that depends on which is asked."""
        return self._only is not None and self._only.is_full()

    def is_full_for(self, tenant: Tenant | None) -> bool:
        """Tell the same for a tenant."""
        return self._only is not None and self._only.is_full_for(tenant)

    def submit(self, request: Request) -> None:
        """Have the model that a body names answer it."""
        endpoint = None
        try:
            body = request.body if self.door.chat_body is None else self.door.chat_body(request.body)
            asked = request_reading.read(body)
            served, contract = self._find(asked.model)
            if request.tenant is not None:
                request.tenant = asked.in_class(request.tenant)
            endpoint = served.endpoint
            if endpoint.is_full_for(request.tenant):  # before anything is made of the body
                raise _full(endpoint.name)
            call = _Call(self, request, asked, body, endpoint, contract)
        except ForebayError as error:
            self.reject(error, tenant=request.tenant, endpoint=endpoint)
            request.reply(request, Failure(error))
            return
        self._calls[request] = call
        call.begin()

    def cancel(self, request: Request) -> None:
        """Forget a request whose client went away."""
        call = self._calls.pop(request, None)
        if call is not None:
            call.count(Code.CANCELLED)
            call.call_off()

    def reject(
        self, error: ForebayError, times: int = 1, tenant: Tenant | None = None, endpoint: Endpoint | None = None
    ) -> None:
        """Count requests that were refused before a model was asked; by default they meant the only one."""
        endpoint = endpoint or self._only
        if endpoint is not None:
            endpoint.reject(error, times, tenant)
            if not isinstance(error, NotFound):  # the model that was asked for is another one
                self.count(endpoint, DURATION, 0.0, error.code, times)

    def count(self, endpoint: Endpoint, family: str, seconds: float, error: str = "", times: int = 1) -> None:
        """Count requests in a histogram of OpenTelemetry's."""
        histogram_of(endpoint.metrics.gen_ai, (family, self._operation, error)).observe(seconds, times)

    def answer(self, request: Request, outcome: Outcome, endpoint: Endpoint) -> None:
        """Reply to a request, in the name of the endpoint that answered it."""
        if self._calls.pop(request, None) is None:
            return
        request.done = True
        self.name, self.answering = endpoint.name, endpoint.answering
        try:
            request.reply(request, outcome)
        finally:
            self.name, self.answering = self.path, None

    def _find(self, model: str) -> tuple[Served, Contract]:
        speaking = self._contracts.get(model)
        if speaking is None:
            hint = nearest(model, self._contracts)
            meant = f"did you mean '{hint}'?" if hint else f"there is {listed(self.names[:10])}"
            raise NotFound(f"no model '{model[:100]}' answers at {self.door.targets[0]}; {meant}")
        if len(speaking) == 1:
            return next(iter(speaking.items()))
        served = self._app.versions(model).turn(speaking)
        return served, speaking[served]


class _Sample(Request, gc=False, eq=False):
    """A sample of a request.

    Attributes:
        of: How many there are, if it is the first; 0 for the others.
    """

    of: int = 0

    def limited_size(self) -> int:
        """Return those of all for the first: together they are one request."""
        return self.of


class _Call:
    """One request on its way through its model: its samples are requests of their own."""

    def __init__(
        self, models: OpenAiModels, request: Request, asked: Asked, body: bytes, endpoint: Endpoint, contract: Contract
    ) -> None:
        """Read the samples off a body in the form of its door.

        Raises:
            InvalidRequest: If there are none, or they cannot be read.
            TooLarge: If there are too many.
        """
        self._models = models
        self._request = request
        self._asked = asked
        self._endpoint = endpoint
        door = models.door
        is_one = door.path in {SPEECH, TRANSCRIPTS}
        samples = [request.body] if is_one else request_reading.samples_of(door.form, asked, body)
        if len(samples) > (limit := endpoint.batching.capacity):
            raise request_reading.too_many(door.form, asked, len(samples), limit)
        self._left = len(samples)
        self._texts: Texts | BlockAnswer | None = None
        self._choices: list[Choice] = []
        self._results: list[bytes] = []
        """The vectors or scores."""
        self._first_at, self._first_tokens = 0.0, 0  # when they came, and how many, of a model that streams
        self._text_tokens = 0
        """Of the texts that they are of."""
        request.id = request.id or next_id()
        if models.path in JOINED:
            self._results = [b""] * len(samples)
        elif models.path != SPEECH:
            now = int(time.time())
            if door.answer is None:
                self._texts = Texts(models.path, asked, request.id, now)
            else:
                self._texts = door.answer(asked, request.id, now, request.body)
            self._choices = [self._texts.choice() for _ in samples]
        self._contract = contract
        self._bodies = samples
        self._samples: list[Request] = []
        """Those that were submitted; none once the call is over."""

    def begin(self) -> None:
        """Submit the samples, until one is refused."""
        request, contract = self._request, self._contract
        request.arrived = time.monotonic()
        timeline.name(request)
        params = self._params_of(contract)
        for number, body in enumerate(self._bodies):
            sample = _Sample(
                [body] if contract.batchable else body,
                partial(self._replied, number),
                params,
                request.origin,
                request.deadline,
                id=request.id,
                run_id=request.run_id,
                trace=request.trace,
                tenant=request.tenant,
                due=request.due,
                on_part=partial(self._part, number) if contract.streams else None,
                of=0 if number else len(self._bodies),
            )
            self._samples.append(sample)
            self._endpoint.submit(sample)
            if not self._samples:
                break

    def count(self, error: str = "") -> None:
        """Count the request, which has ended now; if it was answered, also what its tokens took."""
        now, arrived, first_at = time.monotonic(), self._request.arrived, self._first_at
        count = partial(self._models.count, self._endpoint)
        count(DURATION, now - arrived, error)
        if first_at and not error:
            count(TO_FIRST, first_at - arrived)
            later = sum(choice.tokens for choice in self._choices) - self._first_tokens
            if later > 0:
                count(AFTER_FIRST, (now - first_at) / later)

    def call_off(self) -> None:
        """Let go of all samples, as nobody waits for them any more, and charge the tokens that there were."""
        samples, self._samples = self._samples, []  # they refer to this call, and no collector looks at requests
        for sample in samples:
            self._endpoint.cancel(sample)
            sample.reply, sample.on_part = nothing, None  # an error's traceback may hold the sample for longer
        tokens = (self._text_tokens, 0) if self._texts is None else self._texts.tokens(self._choices)
        if any(tokens):
            self._request.tokens = tokens
            self._endpoint.charge_tokens(self._request.tenant, *tokens)

    def _params_of(self, contract: Contract) -> Mapping[str, Any]:
        given = self._request.params["in"]
        params = _params(contract.call, given, "base64" if self._asked.is_base64 else "json")
        context = self._request.params.get(PARAM)
        if not contract.has_context or context is None:
            return params
        headers, _, client, _ = context
        deadline = self._request.deadline
        usual_s = self._endpoint.config.usual_s(streams=contract.streams)
        left_s = usual_s if deadline == NEVER else deadline - time.monotonic()
        return {**params, PARAM: told(headers, self._request.id, client, left_s)}

    def _part(self, number: int, part: bytes, release: Callable[[], object]) -> None:
        """Take a part of a choice; `release` is called once there is room for the next."""
        texts, request = self._texts, self._request
        choice = self._choices[number] if self._choices else None
        if not self._samples or (choice is not None and choice.is_over):
            release()
            return
        assert request.on_part is not None
        try:
            if choice is None or texts is None:
                request.on_part(audio_of(self._asked, bare(part)), release)
                return
            text = choice.take(bare(part), is_whole=False)
        except ForebayError as error:
            release()
            self._end(Failure(error))
            return
        if not self._first_at and (text or choice.tokens or choice.news):
            self._first_at, self._first_tokens = time.monotonic(), choice.tokens
        if self._asked.stream and (text or choice.news or choice.logprobs):
            request.on_part(texts.event(number, choice, text), release)
        else:
            choice.texts.append(text)
            release()
        if choice.is_over and self._samples:
            self._endpoint.end(self._samples[number])

    def _replied(self, number: int, sample: Request, outcome: Outcome) -> None:
        """Take the outcome of a sample: None if it came in parts."""
        if not self._samples:
            return
        self._request.taken = self._request.taken or sample.taken
        self._request.cost_s += sample.cost_s
        if type(outcome) is Failure:
            self._end(Failure(request_reading.placed(outcome.error, self._models.door.form, self._asked, number)))
            return
        if self._contract.batchable:
            (outcome,) = outcome
        try:
            self._take(number, bare(outcome))
        except ForebayError as error:
            self._end(Failure(error))

    def _take(self, number: int, outcome: bytes | None) -> None:
        self._left -= 1
        texts = self._texts
        if self._models.path == SPEECH:
            if outcome is None and self._request.on_part is not None:  # what came of no part has its type from this
                self._request.on_part(audio_of(self._asked, b""), nothing)
            self._end(None if outcome is None else audio_of(self._asked, outcome))
            return
        if texts is None:
            assert outcome is not None
            self._results[number] = outcome
            if not self._left:
                join, request = JOINED[self._models.path], self._request
                about = request.id, int(time.time()), request.body
                written, self._text_tokens = join(self._asked, *about, self._results)
                self._end(written)
            return
        choice = self._choices[number]
        text = ("" if outcome is None else choice.take(outcome, is_whole=True)) + choice.end()
        if not self._asked.stream:
            choice.texts.append(text)
            if not self._left:
                self._end(texts.whole(self._choices))
            return
        assert self._request.on_part is not None
        last = texts.last_event(number, choice, text)
        self._request.on_part(last if self._left else last + texts.end(self._choices), nothing)
        if not self._left:
            self._end(None)

    def _end(self, outcome: Outcome) -> None:
        self.count(outcome.error.code if type(outcome) is Failure else "")
        self.call_off()
        self._models.answer(self._request, outcome, self._endpoint)


class _OpenAiRoute(Route):
    def __init__(self, models: OpenAiModels, config: HttpConfig, staging: Staging) -> None:
        super().__init__(
            StandIn(models, models.contract),
            config.max_body_bytes,
            config.api_keys,
            config.cors_origins,
            staging,
            elements=config.elements,
        )
        self._names = models.names
        self.frames_parts = False  # they are events already, or audio
        self._door = models.door

    def read_head(self, headers: Iterable[tuple[bytes, bytes]], query: bytes = b"", *, in_query: bool = False) -> Head:
        head = super().read_head(headers, query, in_query=in_query)
        given, reads = ("form", FORM_TYPE) if self.contract.is_named else ("json", JSON_TYPE)
        is_other = head.params["in"] != given and head.problem is None
        if is_other or type(head.problem) is UnsupportedMedia:
            content_type = dict(headers).get(b"content-type", b"").decode("latin-1")
            head.problem = unread_type(content_type, reads)
            head.is_simple = False
        head.params = PARAMS[given, "json"]
        return head

    def counting(self, head: Head, body: bytes | memoryview) -> Steps[Any] | None:
        """Count the elements of a body; there are no tensors here, and a form was counted as it came."""
        if head.params["in"] == "form":
            return None
        return json_elements(body, self.elements.elsewhere, self.elements.elsewhere)

    @cached_property
    def is_full_error(self) -> QueueFull:
        """The error of a request that comes to a full queue."""
        return _full(" and ".join(self._names))

    def fault(self, error: ForebayError, request_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return status, headers and body of an answer that is an error."""
        return fault(error, request_id, self._door.targets[0])

    def cost_event(self, cost: bytes) -> bytes:
        """Write what a stream has cost, as a comment after its end."""
        return COST % cost if cost and not self.contract.raw_output else b""

    def last_part(self, error: ForebayError, request_id: str) -> bytes:
        """Write an error that ends a stream; nothing if that is cut off, as audio has no word for it."""
        if self.contract.raw_output:
            return b""
        return b"%bdata: %b\n\n" % (self._door.error_event, self._door.error_body(error, request_id))


def _full(name: str) -> QueueFull:
    return QueueFull(f"the queue of '{name}' is full; try again later")


@lru_cache(1024)
def _params(call: str, given: str, wanted: str) -> Mapping[str, str]:
    """Return the params of samples; shared, so that a batch of equals is seen at once."""
    params = {"in": given, "out": wanted}
    return {**params, CALL: call} if call else params
