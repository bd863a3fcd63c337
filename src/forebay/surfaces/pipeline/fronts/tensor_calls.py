# SPDX-License-Identifier: Apache-2.0
"""A pipeline in the Open Inference Protocol: tensors are the values of its requests, under their names as keys.

Numbers come to the ops as the tensors of the original's protocol do; a text is a value, and several are a list of
texts. What the pipeline answers under a key is an output: an array, or else its text as BYTES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import InvalidRequest
from forebay.server.served import Served, StandIn
from forebay.serving.models.tensor_codec import TensorCodec, TensorSide, plain_array
from forebay.serving.tensor_face import TensorFace, tensors_of
from forebay.surfaces.pipeline.codes import error_answered
from forebay.surfaces.pipeline.fronts.http import AskedPipeline
from forebay.surfaces.pipeline.protocol import tensors as wire
from forebay.surfaces.pipeline.protocol.literal import parse
from forebay.surfaces.pipeline.protocol.messages import Request as Asking
from forebay.types.call import Failure, Outcome
from forebay.types.failures import failure_of
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.dag.predictions import Predictions

_QUICK_BYTES: Final = 4 * 1024
_codec: Final = TensorCodec(TensorSide(), TensorSide(), has_rows=False)


def let_in(served: Served, inference: Predictions) -> None:
    """Have a pipeline asked in tensors, unless its requests are of a schema of the user's."""
    if inference.request_class is Asking:
        served.tensors = TensorFace(is_open=True, has_rows=False)
        served.stand_in = StandIn(_AskedInTensors(inference, served.endpoint.name, ""), served.contract)


class _AskedInTensors(AskedPipeline):
    """The pipeline in the form of an endpoint whose requests are lists of the data of tensors."""

    def is_quick(self, body: Sequence[Any]) -> bool:
        """Tell whether reading a body takes a moment only."""
        return sum(map(len, body)) <= _QUICK_BYTES

    def read(self, body: Sequence[Any], params: Mapping[str, Any]) -> Any:
        """Return the message that a call stands for.

        Raises:
            InvalidRequest: If it cannot be read, or has a type that pipelines do not know.
        """
        asking = Asking(name=self.name if self._inference.name else "")
        for tensor in tensors_of(params["given"], body):
            array = plain_array(tensor)
            if array.dtype == object:
                texts: list[str] = array.ravel().tolist()
                asking.key.append(tensor.name)
                asking.value.append(texts[0] if len(texts) == 1 else repr(texts))
                continue
            try:
                wire.pack(asking.tensors.add(), tensor.name, array)
            except TypeError as error:
                raise InvalidRequest(str(error)) from None
        return asking

    def written(self, found: Any, params: Mapping[str, Any]) -> Outcome:
        if found.err_no:
            return Failure(error_answered(found.err_no, found.err_msg, self._inference.error_codes))
        values = {key: _value(text) for key, text in zip(found.key, found.value, strict=False)}
        outcome, error = caught(lambda: _codec.encode([{**values, **wire.unpack_all(found.tensors)}], params))
        return outcome if error is None else failure_of(error)


def _value(text: str) -> Any:
    """Return the array that a text shows, or the text."""
    value, error = caught(parse, text, "literal")
    is_array = error is None and hasattr(value, "dtype")
    return value if is_array else text
