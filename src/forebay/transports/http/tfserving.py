# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Serving's protocol over HTTP, of which KServe's first version is a part, for all that is served.

    PredictRoute     POST /v1/models/NAME[/versions/V | /labels/L]:predict, on both lanes of HTTP
    ExamplesRoute    the same with :classify and :regress
    about            GET /v1/models/NAME[/versions/V | /labels/L][/metadata]

Rows go to the model as its samples in JSON, so that whatever it takes there can be asked here; its worker reads them.
Columns, rows with bytes or numbers that JSON cannot say, and rows for a model file without an axis of samples go as
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from forebay.errors import BadOutcome, InvalidRequest, NotFound, Unavailable
from forebay.protocols.tfserving import examples, json_answers
from forebay.protocols.tfserving.example_bodies import counting_examples, decode_examples
from forebay.protocols.tfserving.odd_numbers import holds
from forebay.protocols.tfserving.predict_bodies import as_samples, as_tensors, read_predict
from forebay.server import tfserving_facts as facts
from forebay.server.kserve_facts import find_served
from forebay.serving.models.further_methods import CALL
from forebay.serving.tensor_face import JoinedTensors, TensorFace, TensorRequest, tensors_of
from forebay.transports.http.kserve_calls import JSON, InferenceRoute
from forebay.types.call import ROWS, Media, Origin, Outcome, Reply, Request
from forebay.types.element_limits import Steps, at_once
from forebay.types.failures import without_frames
from forebay.types.json_elements import json_elements
from forebay.types.json_segments import LONG_BYTES

if TYPE_CHECKING:
    from forebay.protocols.native import Contract
    from forebay.server.app import App
    from forebay.server.config import HttpConfig
    from forebay.server.served import Served
    from forebay.transports.http.forms_and_gzip import Staging
    from forebay.transports.http.head import Head
    from forebay.transports.http.route import Route
    from forebay.types.tensor import Data, Tensor

_SAMPLES: Final = {"in": "json", "out": "json", ROWS: "1"}
_COLUMNS: Final = "columns"


class _Rows:
    """How rows of JSON go to what answers by the name of a signature."""

    def __init__(self, contract: Contract, face: TensorFace | None) -> None:
        self.contract = contract
        self.params = {**_SAMPLES, CALL: contract.call} if contract.call else _SAMPLES
        self.is_raw = contract.raw_input or contract.raw_output
        face = face or TensorFace()
        self.only_input = face.inputs[0].name if face.is_bare and len(face.inputs) == 1 else ""
        self.only_output = face.outputs[0].name if face.is_bare and len(face.outputs) == 1 else ""
        # A file whose samples cannot share a run takes all rows as one tensor; without any axis each row is a request.
        self.is_whole = face.is_bare and not face.has_rows
        self.is_whole &= any(one.shape or one.name in face.unranked for one in face.inputs)
        self.takes_bytes = any(one.datatype == "BYTES" for one in face.inputs)
        gives_bytes = any(
            one.datatype == "BYTES" and one.name.endswith(json_answers.BYTES_SUFFIX) for one in face.outputs
        )
        self.in_tensors = self.is_whole or gives_bytes


class _Read(msgspec.Struct, frozen=True):
    """What was read of a body: samples, or tensors for a signature and the form in which they came."""

    told: _Rows
    named: facts.AskedSignature | None = None
    form: str = ""
    tensors: Sequence[Tensor] = ()
    samples: list[memoryview] = []


class _Predict(TensorRequest, gc=False, eq=False):
    """A call with tensors; its `call` is the form in which they came, and go."""

    def joint(self) -> JoinedTensors:
        """Return what puts the outputs of its slices together: as JSON already, for all at once would take long."""
        write = json_answers.columns_in_lists if self.call is _COLUMNS else json_answers.rows_in_lists
        return JoinedTensors(self.size, write)


class PredictRoute(InferenceRoute):
    """`predict`: rows, or columns."""

    def __init__(
        self, served: Served, config: HttpConfig, staging: Staging | None = None, *, is_one_of_several: bool = False
    ) -> None:
        super().__init__(served, config, staging, is_one_of_several=is_one_of_several)
        self.passes_bytes = min(self.passes_bytes, LONG_BYTES)  # what is longer is read in steps
        self._served = served
        self._own = _Rows(served.contract, served.tensors)
        further = [_Rows(one.contract, one.tensors) for one in served.methods]
        self._rows = {one.contract.call: one for one in (self._own, *further)}

    def counting(self, head: Head, body: bytes | memoryview) -> Steps[Any] | None:
        """Count the elements of a body, and read one that is long."""
        del head
        counting = json_elements(body, self.elements.tensors, self.elements.elsewhere)
        return counting if len(body) <= LONG_BYTES else self._reading(body, counting)

    def _reading(self, body: bytes | memoryview, counting: Steps[None] | None = None) -> Steps[_Read]:
        if counting is not None:
            yield from counting
        self.require_whole()
        asked = yield from read_predict(body, self.endpoint.batching.capacity)
        named = facts.asked(self._served, asked.signature) if asked.signature else None
        told = self._own if named is None else self._rows[named.contract.call]
        if (
            asked.rows is None
            or asked.is_odd
            or told.in_tensors
            or (told.takes_bytes and (yield from holds(asked.value, b'"b64"')))
        ):
            named = named or facts.asked(self._served)
            form = _COLUMNS if asked.rows is None else ROWS
            return _Read(told, named, form, (yield from as_tensors(asked, named.face)))
        if told.is_raw:
            msg = f"the model '{self.endpoint.name}' takes or returns bytes, not instances; use /v2 or /models"
            raise InvalidRequest(msg)
        return _Read(told, samples=(yield from as_samples(asked, told.only_input)))

    def request(
        self, head: Head, body: bytes | memoryview, reply: Reply, origin: Origin | None, read: Any = None
    ) -> Request:
        """Make a request of a head and its body; raises ForebayError if the model does not take it."""
        found: _Read = read if isinstance(read, _Read) else at_once(self._reading(body))
        if found.named is None:
            samples = found.samples
            request = Request(samples, reply, found.told.params, origin, size=len(samples), id=head.id)
        else:
            params, size = found.named.ask(found.tensors)
            data = [one.data for one in found.tensors]
            request = _Predict(data, reply, params, origin, size=size, id=head.id, call=found.form)
        self.complete(request, head, origin)
        return request

    def answer(self, request: Request, outcome: Outcome) -> tuple[list[tuple[bytes, bytes]], list[Data]]:
        """Return headers and body of a successful answer."""
        if isinstance(request, TensorRequest):
            tensors = tensors_of(outcome[0], outcome[1:])
            is_columns = request.call is _COLUMNS
            return [JSON], [json_answers.encode_columns(tensors) if is_columns else json_answers.encode_rows(tensors)]
        if any(type(one) is Media for one in outcome):
            raise BadOutcome("a prediction is a forebay.Media, which an array in JSON cannot hold")
        name = self._rows[request.params.get(CALL, "")].only_output
        told = [json_answers.bare(one, name) for one in outcome] if name else outcome
        return [JSON], [b'{"predictions":[' + b",".join(told) + b"]}"]


class ExamplesRoute(InferenceRoute):
    """`classify` or `regress`."""

    def __init__(
        self,
        written: Callable[[Sequence[Tensor], int], bytes],
        served: Served,
        config: HttpConfig,
        staging: Staging | None = None,
        *,
        is_one_of_several: bool = False,
    ) -> None:
        """Answer for a version; `written` writes the results of so many examples."""
        super().__init__(served, config, staging, is_one_of_several=is_one_of_several)
        self._served = served
        self._written = written

    def counting(self, head: Head, body: bytes | memoryview) -> Steps[Any] | None:
        """Count the elements of a body."""
        del head
        return counting_examples(body)

    def request(
        self, head: Head, body: bytes | memoryview, reply: Reply, origin: Origin | None, read: Any = None
    ) -> Request:
        """Make a request of a head and its body; raises ForebayError if the model does not take it."""
        self.require_whole()
        given, signature = decode_examples(body)
        asked = facts.asked(self._served, signature)
        tensors = examples.tensors_of(examples.checked(given), asked.face)
        params, size = asked.ask(tensors)
        request = TensorRequest([one.data for one in tensors], reply, params, origin, size=size, id=head.id)
        self.complete(request, head, origin)
        return request

    def answer(self, request: Request, outcome: Outcome) -> tuple[list[tuple[bytes, bytes]], list[Data]]:
        """Return headers and body of a successful answer."""
        return [JSON], [self._written(tensors_of(outcome[0], outcome[1:]), examples.count_of(request.params))]


def routes_for(
    served: Served,
    config: HttpConfig,
    staging: Staging,
    version: str = "",
    labels: Mapping[str, str] | None = None,
) -> dict[str, Callable[..., Route]]:
    """Return what makes the routes of a version, by target; it is told whether the route `is_one_of_several`."""
    name = quote(served.endpoint.name)
    below = [f"{name}/versions/{quote(version, safe='')}"] if version else [name, f"{name}/versions/{facts.ANY}"]
    below += [f"{name}/labels/{quote(label, safe='')}" for label, of in (labels or {}).items() if of == version]
    found: dict[str, Callable[..., Route]] = {}
    for one in below:
        found[f"/v1/models/{one}:predict"] = partial(PredictRoute, served, config, staging)
        if served.tensors is not None:
            for verb, written in (("classify", _classes), ("regress", _values)):
                found[f"/v1/models/{one}:{verb}"] = partial(ExamplesRoute, written, served, config, staging)
    return found


def _classes(tensors: Sequence[Tensor], count: int) -> bytes:
    return json_answers.encode_classes(examples.classes_of(tensors, count))


def _values(tensors: Sequence[Tensor], count: int) -> bytes:
    return json_answers.encode_values(examples.values_of(tensors, count))


def is_tfserving_path(path: str) -> bool:
    """Tell whether a path belongs to the protocol, and to no other one that begins as it does."""
    above, _, last = path.removeprefix("/v1/models/").partition("/")
    return path.startswith("/v1/models/") and (bool(last) or ":" in above)


def not_there(app: App, path: str) -> NotFound:
    """Return the error of a path below `/v1/models/` at which nothing answers."""
    above, _, verb = path.partition(":")
    name, below = app.split_name(above.split("/"))
    if verb not in {"predict", "classify", "regress"}:
        return NotFound(f"nothing answers at /v1/models/{path[:100]}; there is NAME:predict, :classify and :regress")
    try:
        version = "/".join(below[1:])
        found = facts.find_version(app, name, version, version if below[:1] == ["labels"] else "")
        find_served(app, name, found or "")
    except NotFound as error:
        return without_frames(error)  # its frames would hold it, and the request
    return NotFound(f"the model '{name[:100]}' does not accept tensors, so it does not answer ':{verb[:40]}'")


def about(app: App, name: str, below: Sequence[str]) -> dict[str, Any]:
    """Return what the protocol tells of a model, or of a version of it.

    Args:
        below: The segments of the path behind it.

    Raises:
        NotFound: If there is no such model or version, or nothing is told there.
    """
    match below:
        case ["versions", version, *rest_of]:
            found = facts.find_version(app, name, version)
        case ["labels", label, *rest_of]:
            found = facts.find_version(app, name, label=label)
        case rest_of:
            found = None
    if rest_of == []:
        return {"model_version_status": facts.statuses(app, name, found)}
    if rest_of != ["metadata"]:
        msg = f"nothing at /v1/models/{name[:100]}/{'/'.join(below)[:100]}; there is metadata, versions/V and labels/L"
        raise NotFound(msg)
    versions = app.versions_of(name)
    if versions is None and app.stock is not None and facts.statuses(app, name, found):
        raise Unavailable(f"the model '{name[:100]}' is loaded with its first request, and none has come yet")
    served = find_served(app, name, found or "")
    version = str(facts.number(served.endpoint.config.version))
    return {
        "model_spec": {"name": name, "signature_name": "", "version": version},
        "metadata": {"signature_def": {"signature_def": facts.signature_map(served)}},
    }
