# SPDX-License-Identifier: Apache-2.0
"""What TensorFlow Serving's protocol tells of models, the same over HTTP and gRPC: the names are those of its messages.

A version is a number there; one that is called otherwise is told as 0. A label is a name for a version that whoever
manages the server gives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import InvalidRequest, NotFound
from forebay.protocols.native import Contract
from forebay.repository.tree_rules import number_of
from forebay.runtimes.saved_model import DEFAULT
from forebay.serving.models.further_methods import CALL
from forebay.serving.tensor_face import TensorFace
from forebay.types.datatypes import DATATYPES
from forebay.types.did_you_mean import nearest
from forebay.types.tensorflow_messages import PREDICT

if TYPE_CHECKING:
    from forebay.server.app import App
    from forebay.server.served import Served
    from forebay.types.tensor import Tensor, TensorMetadata

ANY: Final = "0"
"""The version that clients name who mean none, as the one of OpenVINO Model Server does; one called so is meant."""

_STATES: Final = {
    "ready": "AVAILABLE",
    "available": "AVAILABLE",  # it is loaded for who asks
    "loading": "LOADING",
    "leaving": "UNLOADING",
    "failed": "END",
    "unloaded": "END",
}


def find_version(app: App, name: str, version: str = "", label: str = "") -> str | None:
    """Return which version of a model is meant; None leaves it to the weights.

    Raises:
        NotFound: If there is no such model, or nobody gave it the label.
    """
    if not label:
        is_any = version == ANY and not any(one["version"] == ANY for one in app.describe_versions(name))
        return None if is_any else version or None
    labels = app.labels.get(name, {})
    if label not in labels:
        app.versions(name)
        hint = nearest(label, labels)
        told = f"did you mean '{hint}'?" if hint else f"there is {', '.join(map(repr, labels)) or 'none'}"
        raise NotFound(f"the model '{name[:100]}' has no version with the label '{label[:100]}'; {told}")
    return labels[label]


class AskedSignature(msgspec.Struct, frozen=True):
    """What answers by the name of a signature: a version, or a further method of it.

    Attributes:
        name: Of the signature.
        face: What tensors it takes and gives.
        contract: How its bytes are moved.
    """

    name: str
    face: TensorFace
    contract: Contract

    def ask(self, inputs: Sequence[Tensor], outputs: Sequence[str] = ()) -> tuple[dict[str, Any], int]:
        """Check a call, as its face does, and address it."""
        params, size = self.face.ask(inputs, outputs)
        if self.contract.call:
            params[CALL] = self.contract.call
        return params, size


def asked(one: Served, signature: str = "") -> AskedSignature:
    """Return what answers for a version where a signature is named; none, and the default, mean its own.

    Raises:
        InvalidRequest: If it has no such signature, takes no tensors, or answers in parts.
    """
    if one.tensors is None:
        msg = (
            f"the model '{one.endpoint.name}' does not accept tensors; ask it over HTTP at /models/{one.endpoint.name}"
        )
        raise InvalidRequest(msg)
    found = AskedSignature(one.tensors.signature or DEFAULT, one.tensors, one.in_tensors.contract)
    if signature not in {"", DEFAULT, found.name}:
        others = _others(one)
        if signature not in others:
            hint = nearest(signature, [found.name, *others])
            names = ", ".join(map(repr, [found.name, *others]))
            meant = f"did you mean '{hint}'?" if hint else f"there is {names}"
            raise InvalidRequest(f"the model '{one.endpoint.name}' has no signature '{signature[:100]}'; {meant}")
        found = others[signature]
    if found.contract.streams:
        path = f"/models/{one.endpoint.name}"
        msg = f"the model '{one.endpoint.name}' answers in any number of parts; ask it over HTTP at {path}"
        raise InvalidRequest(msg)
    return found


def _others(one: Served) -> dict[str, AskedSignature]:
    return {
        method.tensors.signature: AskedSignature(method.tensors.signature, method.tensors, method.contract)
        for method in one.methods
        if method.tensors is not None and not method.contract.streams
    }


def number(version: str) -> int:
    """Return a version as a number; 0 for one that is none, or that the protocol's 64 bits do not hold."""
    found = number_of(version) or 0
    return found if found < 1 << 63 else 0


def signature_map(one: Served) -> dict[str, Any]:
    """Return what a version takes and gives, by its signatures; raises an `InvalidRequest` if it takes no tensors."""
    return {one.name: _signature(one.face) for one in (asked(one), *_others(one).values())}


def statuses(app: App, name: str, version: str | None = None) -> list[dict[str, Any]]:
    """Return where the versions of a model are; raises a `NotFound` if there is no such model or version."""
    found = [
        {
            "version": str(number(one["version"])),
            "state": _STATES[one["state"]],
            "status": {
                "error_code": "UNKNOWN" if one.get("error") else "OK",
                "error_message": one.get("error", ""),
            },
        }
        for one in _described(app, name)
        if one["state"] in _STATES and version in {None, one["version"]}
    ]
    if not found:
        app.versions(name)
        raise NotFound(f"the model '{name[:100]}' has no version '{str(version)[:100]}'")
    return sorted(found, key=lambda one: -int(one["version"]))


def _described(app: App, name: str) -> Iterable[dict[str, Any]]:
    return app.describe(name)["versions"] if name in app.served else app.describe_versions(name)


def _signature(face: TensorFace) -> dict[str, Any]:
    return {
        "inputs": {one.name: _tensor_info(one, face.unranked, face.input_tensors) for one in face.inputs},
        "outputs": {one.name: _tensor_info(one, face.unranked_outputs, face.output_tensors) for one in face.outputs},
        "method_name": PREDICT,
        "defaults": {},
    }


def _tensor_info(port: TensorMetadata, unranked: Collection[str], names: Mapping[str, str]) -> dict[str, Any]:
    is_unranked = port.name in unranked
    dims = [] if is_unranked else [{"size": str(axis), "name": ""} for axis in port.shape]
    kind = DATATYPES[port.datatype].tensorflow_name
    return {
        "dtype": f"DT_{kind}",
        "tensor_shape": {"dim": dims, "unknown_rank": is_unranked},
        "name": names.get(port.name, ""),
    }
