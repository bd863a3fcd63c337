# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Serving's `PredictionService` and `ModelService`, for all models of an app that take tensors.

A call is read on the loop if it is short; one that is long, or whose model has to be loaded first, has a task.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from google.protobuf import json_format

from forebay.errors import ForebayError, InvalidRequest, NotFound, TooLarge, Unavailable
from forebay.protocols.tfserving import examples
from forebay.protocols.tfserving.messages import MODELS, PREDICTION, SERVING, UNCUT
from forebay.protocols.tfserving.predict_bodies import MAX_INPUTS
from forebay.repository.version_policy import VersionPolicy
from forebay.server import tfserving_facts as facts
from forebay.server.model_reload import WantedModel, reload
from forebay.serving.tensor_face import MAX_EMPTY_ROWS, TensorFace, TensorRequest, tensors_of
from forebay.transports.grpc.call_tasks import run_beside
from forebay.transports.grpc.multi_inference import multi_inference
from forebay.transports.grpc.on_demand_models import Lending
from forebay.transports.grpc.service import Call, Direct, GrpcService
from forebay.transports.grpc.statuses import MayNotManage
from forebay.transports.grpc.tensor_calls import QUICK_BYTES, STATUSES, TensorReaders, complete
from forebay.types.call import Failure, Outcome, Request
from forebay.types.tensor_proto import Room, put, tensor_in, tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.server.app import App
    from forebay.server.served import Served
    from forebay.types.tensor import Tensor

_SIGNATURES: Final = "signature_def"
"""The only kind of metadata that there is."""


class _Kind(msgspec.Struct, frozen=True):
    """One of the methods that ask a model.

    Attributes:
        takes: The message it takes.
        read: Reads that into tensors, with names of what is wanted.
        write: Writes the answer for so many samples into the message it gives.
        gives: That message.
        is_uncut: Whether `read` takes tensors that nobody has read, which a long message may have.
    """

    takes: str
    read: Callable[[Any, TensorFace], tuple[list[Tensor], Sequence[str]]]
    write: Callable[[Any, Sequence[Tensor], int], None]
    gives: str
    is_uncut: bool = False


class _Asked(msgspec.Struct, eq=False):
    """A request that is inside.

    Attributes:
        done: Called with the message that is its answer, or with the error.
    """

    call: Call
    kind: _Kind
    served: Served
    asked: facts.AskedSignature
    done: Callable[[Any], object]


class TfServing:
    """The services of one port."""

    def __init__(self, app: App, *, is_managed: bool = False) -> None:
        """Describe them.

        Args:
            is_managed: Whether clients may say which versions are loaded.
        """
        self._app = app
        self._is_managed = is_managed
        self._lending = Lending(app, STATUSES)
        self._readers = TensorReaders()

    def services(self) -> list[GrpcService]:
        """Return what a port is given."""
        *files, described = SERVING.described()
        asking = {name: self._method(kind) for name, kind in _KINDS.items()}
        together = multi_inference(lambda name, given, call: self._ask(_KINDS[name], given, call))
        return [
            GrpcService(
                full_name=PREDICTION,
                direct={**asking, "MultiInference": together, "GetModelMetadata": self._metadata},
                files=[*files, described],
            ),
            GrpcService(
                full_name=MODELS,
                direct={"GetModelStatus": self._status},
                unary={"HandleReloadConfigRequest": self._reload},
                files=[*files, described],
            ),
        ]

    # Asking models

    def _method(self, kind: _Kind) -> Direct:
        def method(message: bytes, call: Call) -> None:
            try:
                if len(message) <= QUICK_BYTES:
                    given = SERVING.parsed(kind.takes, message)
                    _, served = self._find(given.model_spec)
                    if served is not None:
                        asked = facts.asked(served, given.model_spec.signature_name)
                        begun = _Asked(call, kind, served, asked, partial(_told, call))
                        request, endpoint = _request(begun, *kind.read(given, asked.face)), served.in_tensors.endpoint
                        call.on_cancel = partial(endpoint.cancel, request)  # before, for it may be refused at once
                        endpoint.submit(request)
                        return
            except ForebayError as error:
                call.fail(error, STATUSES)
            else:
                run_beside(partial(self._slowly, kind, message, call), call, STATUSES)

        return method

    def _find(self, spec: Any) -> tuple[str, Served | None]:
        """Return the version that is meant, and who answers for it; None if it has to be loaded.

        Raises:
            NotFound: If there is no such model or version.
        """
        name, choice = spec.name, spec.WhichOneof("version_choice")
        if spec.version.value < 0:
            raise NotFound(f"the model '{name[:100]}' has no version {spec.version.value}")
        said = str(spec.version.value) if choice == "version" else ""
        version = facts.find_version(self._app, name, said, spec.version_label) or ""
        if self._lending.may_lend(name, version):
            return version, None
        versions = self._app.versions(name)
        if not version and versions.weights:
            return version, versions.turn()
        if version not in versions.ready:
            raise versions.unknown(version)
        return version, versions.ready[version]

    async def _slowly(self, kind: _Kind, message: bytes, call: Call) -> None:
        given = await self._readers.run((UNCUT if kind.is_uncut else SERVING).parsed, kind.takes, message)
        _told(call, await self._ask(kind, given, call))

    async def _ask(self, kind: _Kind, given: Any, call: Call) -> Any:
        """Return the message that answers another one, or the error that does; it is called off with its task."""
        version, served = self._find(given.model_spec)
        async with contextlib.AsyncExitStack() as stack:
            if served is None:
                served = await stack.enter_async_context(self._lending.lend(given.model_spec.name, version, call))
            asked = facts.asked(served, given.model_spec.signature_name)
            tensors = await self._readers.run(kind.read, given, asked.face)
            answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            begun = _Asked(call, kind, served, asked, lambda found: answered.done() or answered.set_result(found))
            request, endpoint = _request(begun, *tensors), served.in_tensors.endpoint
            endpoint.submit(request)
            try:
                return await answered
            except asyncio.CancelledError:
                endpoint.cancel(request)
                raise

    # Telling of models

    def _metadata(self, message: bytes, call: Call) -> None:
        asked = SERVING.parsed("GetModelMetadataRequest", message)
        for field in asked.metadata_field:
            if field != _SIGNATURES:
                raise InvalidRequest(f"expected the metadata_field '{_SIGNATURES}', got '{field[:100]}'")
        if not asked.metadata_field:
            raise InvalidRequest(f"expected the metadata_field '{_SIGNATURES}', got none")
        _, served = self._find(asked.model_spec)
        if served is None:
            raise Unavailable(
                f"the model '{asked.model_spec.name}' is loaded with its first request, and none has come yet"
            )
        told = SERVING.classes().SignatureDefMap()
        json_format.ParseDict({"signature_def": facts.signature_map(served)}, told)
        found = SERVING.classes().GetModelMetadataResponse()
        _put_spec(found.model_spec, served, facts.DEFAULT)
        found.metadata[_SIGNATURES].type_url = f"type.googleapis.com/{told.DESCRIPTOR.full_name}"
        found.metadata[_SIGNATURES].value = told.SerializeToString()
        call.reply(found.SerializeToString())

    def _status(self, message: bytes, call: Call) -> None:
        spec = SERVING.parsed("GetModelStatusRequest", message).model_spec
        said = str(spec.version.value) if spec.WhichOneof("version_choice") == "version" else ""
        version = facts.find_version(self._app, spec.name, said, spec.version_label)
        told = {"model_version_status": facts.statuses(self._app, spec.name, version)}
        call.reply(json_format.ParseDict(told, SERVING.classes().GetModelStatusResponse()).SerializeToString())

    async def _reload(self, message: bytes, _call: Call) -> bytes:
        config = SERVING.parsed("ReloadConfigRequest", message).config
        if not self._is_managed:
            raise MayNotManage("clients say what is loaded where calls need a key (--api-key), or with --manage")
        if config.WhichOneof("config") != "model_config_list":
            raise InvalidRequest("expected a model_config_list; no other configuration is supported")
        await reload(self._app, [_wanted(one) for one in config.model_config_list.config])
        return SERVING.classes().ReloadConfigResponse(status={"error_code": 0}).SerializeToString()


def _wanted(config: Any) -> WantedModel:
    policy = config.model_version_policy
    latest = 0 if policy.WhichOneof("policy_choice") == "all" else policy.latest.num_versions or 1
    versions = VersionPolicy(latest=latest, only=frozenset(policy.specific.versions))
    labels = {label: str(version) for label, version in config.version_labels.items()}
    return WantedModel(name=config.name, place=config.base_path, policy=versions, labels=labels)


def _request(begun: _Asked, inputs: Sequence[Tensor], outputs: Sequence[str]) -> TensorRequest:
    """Make a request of tensors that have been read; raises the ForebayError that says why there is no answer."""
    call, data, until = begun.call, [one.data for one in inputs], begun.call.deadline
    params, size = begun.asked.ask(inputs, outputs)
    request = TensorRequest(data, _replied, params, None, until, size, due=until, tenant=call.tenant, call=begun)
    complete(request, call, begun.asked.contract, begun.served.in_tensors.endpoint)
    return request


def _replied(request: Request, outcome: Outcome) -> None:
    assert isinstance(request, TensorRequest)
    asked: _Asked = request.call
    asked.call.answered_by(asked.served.in_tensors.endpoint, request)
    found: Any = outcome.error if type(outcome) is Failure else _answer(asked, request, outcome)
    request.call = None  # the collector does not look at requests: no circle may go through one
    asked.done(found)


def _answer(asked: _Asked, request: Request, outcome: Outcome) -> Any:
    """Return the message that is an answer, or the error of one that cannot be."""
    answer = getattr(SERVING.classes(), asked.kind.gives)()
    try:
        asked.kind.write(answer, tensors_of(outcome[0], outcome[1:]), examples.count_of(request.params))
    except ForebayError as error:
        return error
    _put_spec(answer.model_spec, asked.served, asked.asked.name)
    return answer


def _told(call: Call, found: Any) -> None:
    """Answer a call with a message, or an error."""
    if isinstance(found, ForebayError):
        call.fail(found, STATUSES)
    else:
        call.reply(found.SerializeToString())


def _put_spec(into: Any, served: Served, signature: str) -> None:
    """Say who answered."""
    config = served.endpoint.config
    into.name, into.signature_name = config.name, signature
    into.version.value = facts.number(config.version)


def _read_predict(asked: Any, face: TensorFace) -> tuple[list[Tensor], Sequence[str]]:
    if len(asked.inputs) > MAX_INPUTS:
        raise TooLarge(f"expected at most {MAX_INPUTS} inputs, got {len(asked.inputs)}")
    outputs: dict[str, None] = {}
    for name in asked.output_filter:
        if name in outputs:
            raise InvalidRequest(f"duplicate output tensor alias: {name[:80]}")
        outputs[name] = None
    room = Room()
    tensors = [
        (tensor_in if isinstance(given, bytes) else tensor_of)(name, given, room)
        for name, given in asked.inputs.items()
    ]
    rows = max((one.shape[0] for one in tensors if one.shape), default=0)
    if face.has_rows and rows > MAX_EMPTY_ROWS and rows > asked.ByteSize():  # each is a step of Python, on the loop
        msg = f"the call has {rows} samples, more than it has bytes; of {MAX_EMPTY_ROWS} at most nothing has to come"
        raise InvalidRequest(msg)
    return tensors, list(outputs)


def _read_examples(asked: Any, face: TensorFace) -> tuple[list[Tensor], Sequence[str]]:
    return examples.tensors_of(examples.read_examples(asked.input), face), ()


def _write_predict(into: Any, tensors: Sequence[Tensor], _count: int) -> None:
    for one in tensors:
        put(into.outputs[one.name], one)


def _write_classes(into: Any, tensors: Sequence[Tensor], count: int) -> None:
    for row in examples.classes_of(tensors, count):
        classes = into.result.classifications.add().classes
        for label, score in row:
            classes.add(label=label, score=score)


def _write_values(into: Any, tensors: Sequence[Tensor], count: int) -> None:
    for value in examples.values_of(tensors, count):
        into.result.regressions.add(value=value)


_KINDS: Final = {
    "Predict": _Kind("PredictRequest", _read_predict, _write_predict, "PredictResponse", is_uncut=True),
    "Classify": _Kind("ClassificationRequest", _read_examples, _write_classes, "ClassificationResponse"),
    "Regress": _Kind("RegressionRequest", _read_examples, _write_values, "RegressionResponse"),
}
