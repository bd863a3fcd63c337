# SPDX-License-Identifier: Apache-2.0
"""What a server answers with under a name: an endpoint, and what protocols must know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from forebay.observe.logs.access_log import Answering
from forebay.protocols.native import Contract
from forebay.protocols.openapi import PREDICT, Described
from forebay.serving.models.schema_places import PREFIX, fields_at
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.batching.queue import BatchConfig
    from forebay.errors import ForebayError
    from forebay.graph.drawing.draw import Drawable
    from forebay.protocols.kserve.infer_calls import InferRequest, InferResponse
    from forebay.serving.endpoint import Endpoint, EndpointConfig
    from forebay.serving.tensor_face import TensorFace
    from forebay.types.call import Outcome, Request
    from forebay.types.tenant import Tenant
    from forebay.workers.memory.landing import Places


class ServedMethod(msgspec.Struct, frozen=True):
    """A method of a model beside `predict`, with what protocols must know of it."""

    contract: Contract
    described: Described
    tensors: TensorFace | None = None


def contract_of(described: Described, *, has_context: bool = False, shares_disk: bool = True) -> Contract:
    """Return how the bytes of an endpoint are moved that is documented so."""
    given, answer = described.input, described.output
    has_fields = described.is_named and not described.batchable  # read from a schema that a worker may have told
    fields = caught(lambda: fields_at("$", *given.json_schema(PREFIX + "{name}")))[0] if has_fields else None
    return Contract(
        raw_input=given.raw,
        raw_output=answer.raw,
        batchable=described.batchable,
        streams=described.streams,
        query=tuple(described.query),
        has_media=answer.has_media,
        is_named=described.is_named,
        shares_disk=shares_disk,
        has_context=has_context,
        openai=given.openai,
        call="" if described.call == PREDICT else described.call,
        verbs=described.verbs,
        fields=tuple(fields or ()),
        in_pieces=given.in_pieces,
    )


class Session(Protocol):
    """A stream of requests that belong together: a graph's, which run in it as one."""

    @property
    def pending(self) -> int:
        """Requests that have not been worked off, and for which it need not read on."""
        ...

    @property
    def held(self) -> int:
        """How many of the last requests may still be in memory."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs: only a further request would lead to an answer."""
        ...

    def send(self, asked: InferRequest, /) -> None:
        """Take a request; raises a `ForebayError` if it is wrong in itself, and others may follow."""
        ...

    def close(self) -> None:
        """Say that no further request comes."""
        ...

    def cancel(self) -> None:
        """End it now."""
        ...


class OpenSession(Protocol):
    """Opens a session."""

    def __call__(
        self,
        on_answer: Callable[[InferResponse, Callable[[], object]], object],
        on_end: Callable[[Request | None, Outcome], object],
        on_progress: Callable[[], object] = ...,
        *,
        deadline: float = ...,
        tenant: Tenant | None = ...,
    ) -> Session:
        """Open one.

        Args:
            on_answer: Called with each answer, and with what to call once there is room for the next.
            on_end: Called once, with what stood for it at the endpoint, if anything did, and None or a `Failure`.
            on_progress: Called whenever requests were worked off.
            deadline: When it ends at the latest.
        """
        ...


class AskedEndpoint(Answering, Protocol):
    """What doors ask of an endpoint; several models, or a pipeline, may stand for one."""

    @property
    def config(self) -> EndpointConfig:
        """Its name and its times."""
        ...

    @property
    def batching(self) -> BatchConfig:
        """How many samples may wait."""
        ...

    @property
    def places(self) -> Places | None:
        """Where bodies land that all its workers can read there; None where they cannot."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; `request.reply` is called on the loop once its outcome is known."""
        ...

    def cancel(self, request: Request) -> None:
        """Forget a request whose client went away."""
        ...

    def reject(self, error: ForebayError, times: int = 1, tenant: Tenant | None = None) -> None:
        """Count requests, of a tenant if it is known, that were refused before they could be submitted."""
        ...

    def is_full(self) -> bool:
        """Tell whether anything submitted now is refused."""
        ...

    def is_full_for(self, tenant: Tenant | None) -> bool:
        """Tell the same of what is submitted for a tenant, for which others may have to leave the queue."""
        ...


class StandIn(NamedTuple):
    """What stands for something served: who answers, and how its bytes are moved."""

    endpoint: AskedEndpoint
    contract: Contract


class Served(msgspec.Struct, eq=False, weakref=True):
    """An endpoint with what protocols must know of it.

    Attributes:
        endpoint: What answers.
        contract: How its bytes are moved.
        described: How it is documented; None where its requests are opaque.
        nodes: The endpoints of its nodes by name, if it is a graph. They start and stop with it.
        weight: Its part of what is asked for without a version; None leaves it to the first version of its name.
        drawing: How it is drawn, if it is a graph that can be.
        methods: What the same endpoint answers at further paths.
        tensors: What tensors it takes and gives; None if it takes none.
        stand_in: Who is asked in tensors in its place, if these have to be brought into another form first.
        session: Opens what answers a stream of requests; None where each of them stands for itself.
        check: Called in a thread once its workers are up; raises if it must not take its place all the same.
        has_versions: Whether a version that requests name must be its own.
        any_version: What requests may name for whichever version answers those that name none; None if nothing.
        is_elsewhere: Whether another server has its workers.
        gone: Called when its workers have ended, and what they used may go.
    """

    endpoint: Endpoint
    contract: Contract
    described: Described | None = None
    nodes: Mapping[str, Endpoint] = {}
    weight: int | None = None
    drawing: Drawable | None = None
    methods: Sequence[ServedMethod] = ()
    tensors: TensorFace | None = None
    stand_in: StandIn | None = None
    session: OpenSession | None = None
    check: Callable[[], None] | None = None
    has_versions: bool = True
    any_version: str | None = None
    is_elsewhere: bool = False
    gone: Callable[[], None] = lambda: None

    @property
    def in_tensors(self) -> Served | StandIn:
        """The servable that is asked in tensors."""
        return self.stand_in or self

    @property
    def contracts(self) -> dict[str, Contract]:
        """How bytes are moved, by the path below the model."""
        return {"": self.contract, **{one.described.path: one.contract for one in self.methods}}
