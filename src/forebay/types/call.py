# SPDX-License-Identifier: Apache-2.0
"""One call, from the moment its bytes were read to its outcome.

A `Request` is created once by a transport and is the same object in the queue, in the batch and in
the reply; nothing is copied on the way. What a worker process sees of it is an `Item`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, final

import msgspec

from forebay.errors import ForebayError
from forebay.types.model_answer import Headers, checked_headers, checked_status, error_of
from forebay.types.tenant import Tenant


class Alone:
    """Type of `ALONE`."""

    def __repr__(self) -> str:
        """Print by name, as in the documentation."""
        return "ALONE"


ALONE: Final = Alone()
"""Batch key of a request that shares its batch with nobody and does not wait for company."""

_WORD: Final = r"[\w!#$%&'*+.^`|~-]+"
_QUOTED: Final = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_MEDIA_TYPE: Final = re.compile(rf"{_WORD}/{_WORD}(?:[ \t]*;[ \t]*{_WORD}=(?:{_WORD}|{_QUOTED}))*", re.ASCII)
"""A media type as RFC 9110 has it (8.3.1), in printable ASCII."""

EMPTY: Final[Mapping[str, Any]] = {}

ROWS: Final = "rows"
"""Among the params of a request whose body is a list of samples although the endpoint takes one; so is its outcome.

Its results are written as rows of TensorFlow Serving's JSON.
"""


FIELDS: Final = "fields"
"""Among the params of a request that has fields of its sample in its query: their names and values, as texts."""

HEALTH: Final = "health"
"""The only param of an item that asks a model how it is; its body says nothing."""


def written_in(params: Mapping[str, Any]) -> str:
    """Return the format of results that params ask for."""
    return "rows" if ROWS in params else params["out"]


class Origin(Protocol):
    """The connection or peer a request came by; the gather rule learns from it who comes back."""

    release: int


class Item(Protocol):
    """What a runner reads of one request."""

    @property
    def body(self) -> Any:
        """Bytes as the transport read them (a list of them for a request of several samples), or a Python object."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """What the protocol says about the body: formats, headers, query; plain data only."""
        ...

    @property
    def size(self) -> int:
        """Samples in the body."""
        ...


class Failure(msgspec.Struct, frozen=True, eq=False):
    """The outcome of an item that failed; its batch-mates are not touched."""

    error: ForebayError


class After(msgspec.Struct, frozen=True, eq=False):
    """An outcome with work that the same worker does once the answer was written; its slot stays taken until then."""

    outcome: Any
    work: Callable[[], object]


@final
class Media:
    """A whole result that is bytes of a media type of its own, such as a picture; HTTP sends it as it is.

    No encoder knows this class: one that stands where none can be is an error, and never an object of JSON.
    """

    __slots__ = ("_body", "_head", "_type")

    def __init__(self, body: bytes | bytearray | memoryview, type: str) -> None:
        """Put bytes and their type together.

        Args:
            type: What they are, such as `image/png`.

        Raises:
            TypeError: The body is not bytes.
            ValueError: The type cannot stand in a header.
        """
        if not _MEDIA_TYPE.fullmatch(type):
            raise ValueError(f"expected a media type such as 'image/png', got {type!r:.100}")
        try:
            # Neither has a class of its own, such as NumPy's, which no frame between processes could hold.
            self._body = memoryview(body).tobytes() if body.__class__ is not bytes else bytes(body)
        except TypeError:
            raise TypeError(f"the body of a Media is bytes, and not {body.__class__.__name__}") from None
        self._type = str.__str__(type)
        self._head: tuple[int, Headers] = 200, ()  # of an `Answer` that it was made of

    @property
    def body(self) -> bytes:
        """The bytes."""
        return self._body

    @property
    def type(self) -> str:
        """What they are."""
        return self._type

    def __eq__(self, other: object) -> bool:
        """Compare bytes and type."""
        about = self._body, self._type, self._head
        return isinstance(other, Media) and about == (other._body, other._type, other._head)

    def __hash__(self) -> int:
        """Return the same for those that are equal."""
        return hash((self._body, self._type))

    def __repr__(self) -> str:
        """Print the type and how much there is."""
        return f"Media(<{len(self._body)} bytes>, {self._type!r})"


MediaHead: TypeAlias = str | tuple[str, int, Headers]
"""What processes tell each other of a `Media`: its type; in an `Answer` its type or an empty text, status, headers."""


def media_of(body: bytes, told: Any) -> Media:
    """Return a result of which this is told, as by `told_of`; raises a `ValueError` if that is wrong."""
    kind, status, headers = (told, 200, ()) if isinstance(told, str) else told
    media = Media(body, kind or "application/json")
    media._type, media._head = kind, (checked_status(status), checked_headers(headers))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    return media


def head_of(media: Media) -> tuple[int, Headers]:
    """Return the status and the headers that its model has decided on."""
    return media._head  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def told_of(media: Media) -> MediaHead:
    """Return what another process has to know of a result beside its bytes."""
    head = head_of(media)
    return media.type if head == (200, ()) and media.type else (media.type, *head)


def status_in(outcome: Outcome) -> int:
    """Return the status of the HTTP answer that a result is."""
    return head_of(outcome)[0] if type(outcome) is Media else 200


def bare(outcome: Outcome) -> Any:
    """Return a result without its head; raises the error that a protocol tells of a status of 400 and more."""
    status = status_in(outcome)
    if status >= 400:
        raise error_of(status, outcome.body)
    return outcome.body if type(outcome) is Media else outcome


P = TypeVar("P")


@final
class Last(Generic[P]):
    """What `Model.step` returns for a stream that ends: its last part, or none if there is no further one."""

    __slots__ = ("part",)

    def __init__(self, part: P | None = None) -> None:
        """End a stream, with this part or without any."""
        self.part: P | None = part

    def __repr__(self) -> str:
        """Print the part."""
        return f"Last({self.part!r})"


Outcome = Any  # a runner's result for one item, or a Failure

Reply = Callable[["Request", Outcome], None]


def nothing(*_: object) -> None:
    """Stand where a function is called that has nothing to do: nobody waits, or there is nothing to let go of."""


class ReplyToAll:
    """A reply that requests of several clients have in common: those of one batch may be answered at once."""

    __slots__ = ()

    def __call__(self, request: Request, outcome: Outcome) -> None:
        """Answer one."""
        raise NotImplementedError

    def to_all(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> Sequence[tuple[Request, Outcome]]:
        """Answer several, none of which failed; returns those that are to be answered one by one. Raises nothing."""
        raise NotImplementedError


class Joint(Protocol):
    """What puts the outcomes of slices together, as they come."""

    def add(self, rows: Sequence[int], outcome: Outcome) -> None:
        """Take the outcome of these samples; raises a `ForebayError` if it does not go with the others."""
        ...

    def whole(self) -> Outcome:
        """Return the outcome of all samples, once nothing is missing."""
        ...


class Request(msgspec.Struct, eq=False, gc=False):
    """One call by one client: one id, one deadline, one answer (or one stream of parts).

    The garbage collector does not look at requests: whoever refers to one lets go of it when it is answered.

    Attributes:
        body: What the worker will decode; a list with one element a sample when `size` may exceed 1.
        reply: Called on the loop, exactly once, with the request and its outcome.
        deadline: Absolute, in the loop's clock; infinity means none.
        size: Samples along the batch axis.
        key: Only requests with an equal key share a batch; `ALONE` shares with nobody.
        origin: The connection the request came by, if the transport knows one.
        arrived: When it was submitted, in the loop's clock.
        taken: When its batch left the queue; 0 while it waits.
        done: True from the moment its outcome was decided.
        id: What the client and the log call it; empty until somebody needs it.
        run_id: What the timeline calls it, also in the nodes of a graph; no two clients can have chosen the same. Empty
            while nobody listens.
        rank: Where batches are filled by rank, lower ones go first.
        tenant: Whose it is, where the server tells tenants apart.
        payer: The flow that pays for it in its queue; set where tenants share that.
        due: The deadline that its client states, or that is set for its tenant; infinity where there is neither. What
            would be later is refused at once.
        on_part: For callers that take streamed answers: called on the loop with each part and a function to call
            once there is room for the next.
        on_bundle: For callers that would rather have several parts at once: called in place of `on_part`.
        trace: The `traceparent` that it came with.
        cost_s: Seconds that workers were busy for it so far, as far as that is counted.
        tokens: Of its prompt and of its answer, where its model counts them.
        until: The deadline that it has from the first part of its answer on; infinity if `deadline` stays.
    """

    body: Any
    reply: Reply
    params: Mapping[str, Any] = EMPTY
    origin: Origin | None = None
    deadline: float = float("inf")
    size: int = 1
    key: Hashable = None
    arrived: float = 0.0
    taken: float = 0.0
    done: bool = False
    id: str = ""
    run_id: str = ""
    rank: int = 0
    tenant: Tenant | None = None
    payer: Any = None
    due: float = float("inf")
    on_part: Callable[[Any, Callable[[], object]], None] | None = None
    on_bundle: Callable[[Sequence[Any], Callable[[], object]], None] | None = None
    trace: str = ""
    cost_s: float = 0.0
    tokens: tuple[int, int] = (0, 0)
    until: float = float("inf")

    def root(self) -> Request:
        """Return the request of a client that this one is for: itself outside of a graph."""
        return self

    def place(self) -> str:
        """Return where in a graph it is, as the beginning of what is told of it there; empty outside of one."""
        return ""

    def may_wait(self) -> bool:
        """Tell whether it waits for room in a full queue instead of being refused; its sender bounds how many do."""
        return False

    def is_counted_elsewhere(self) -> bool:
        """Tell whether a front counts it among the requests of its clients."""
        return False

    def limited_size(self) -> int:
        """Return the samples that it takes of its tenant's limits; 0 if another one has taken them for it."""
        return self.size

    def opening(self) -> Iterator[None]:
        """Read what has to be read before it can be cut, in steps of a millisecond or so; `params` may change.

        A row that is longer than a step is one.

        Raises:
            ForebayError: If it cannot be read.
        """
        return iter(())

    def cut(self, rows: Sequence[int]) -> Any:
        """Return the body of a slice of these samples."""
        return [self.body[row] for row in rows]

    def joint(self) -> Joint:
        """Return what puts the outcomes of its slices together."""
        return _Listed(self.size)


class _Listed:
    """Results of samples, one after the other."""

    def __init__(self, size: int) -> None:
        self._results: list[Any] = [None] * size

    def add(self, rows: Sequence[int], outcome: Outcome) -> None:
        for row, result in zip(rows, outcome, strict=True):
            self._results[row] = result

    def whole(self) -> Outcome:
        return self._results


class Slice(msgspec.Struct, eq=False):
    """Some samples of a request that is larger than a batch; their cutter joins the outcomes again."""

    whole: Request
    body: Sequence[Any]
    reply: Callable[[Slice, Outcome], None]
    deadline: float = float("inf")
    params: Mapping[str, Any] = EMPTY
    size: int = 1
    key: Hashable = None
    origin: Origin | None = None
    arrived: float = 0.0
    taken: float = 0.0
    done: bool = False
    rank: int = 0
    tenant: Tenant | None = None
    payer: Any = None
    due: float = float("inf")
    """That of the whole was looked at before it was cut, and ends it in time."""

    def root(self) -> Request:
        """Return the request of a client that it is for."""
        return self.whole.root()
