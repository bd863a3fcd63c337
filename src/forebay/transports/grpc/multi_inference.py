# SPDX-License-Identifier: Apache-2.0
"""`MultiInference` of TensorFlow Serving: several signatures of a model are asked with the same examples.

Each task is a call of its own, to `Classify` or `Regress`, and what comes back is put together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.errors import ForebayError, InvalidRequest
from forebay.protocols.tfserving.messages import SERVING, UNCUT
from forebay.transports.grpc.call_tasks import run_beside
from forebay.transports.grpc.model_infer import STATUSES
from forebay.transports.reading_turns import in_turns
from forebay.types.element_limits import ElementLimits
from forebay.types.proto_elements import message_elements
from forebay.types.tensorflow_messages import CLASSIFY, REGRESS

if TYPE_CHECKING:
    from forebay.observe.logs.access_log import Answering
    from forebay.transports.grpc.service import Call, Direct
    from forebay.types.call import Request
    from forebay.types.tenant import Tenant

_MOST: Final = ElementLimits(elsewhere=10_000, tensors=10_000)
"""How many elements a message has beside its examples. A model has some signatures, and each is asked once."""
_METHODS: Final = {
    CLASSIFY: ("Classify", "ClassificationRequest", "ClassificationResponse", "classification_result"),
    REGRESS: ("Regress", "RegressionRequest", "RegressionResponse", "regression_result"),
}


def multi_inference(methods: Mapping[str, Direct]) -> Direct:
    """Return the method; `methods` answer its tasks."""

    def method(message: bytes, call: Call) -> None:
        run_beside(partial(_together, message, methods, call), call, STATUSES)

    return method


async def _together(message: bytes, methods: Mapping[str, Direct], call: Call) -> None:
    """Ask one task after the other: each has a copy of the examples, and the first that fails is the answer."""
    await in_turns(message_elements(message, UNCUT.classes().MultiInferenceRequest.DESCRIPTOR, _MOST))
    given = SERVING.parsed("MultiInferenceRequest", message)
    _check(given.tasks)
    part: _Part | None = None
    found: list[bytes] = []
    try:
        for task in given.tasks:
            name, takes, _, _ = _METHODS[task.method_name]
            asked = getattr(SERVING.classes(), takes)(model_spec=task.model_spec, input=given.input)
            part = _Part(call)
            methods[name](asked.SerializeToString(), cast("Call", part))  # it has what they use
            found.append(await part.answer)
    except asyncio.CancelledError:
        if part is not None and part.on_cancel is not None:
            part.on_cancel()
        raise
    else:
        call.reply(_answer(given.tasks, found))


def _answer(tasks: Sequence[Any], found: Sequence[bytes]) -> bytes:
    answer = SERVING.classes().MultiInferenceResponse()
    for task, message in zip(tasks, found, strict=True):
        _, _, gives, field = _METHODS[task.method_name]
        told, result = SERVING.parsed(gives, message), answer.results.add()
        result.model_spec.CopyFrom(told.model_spec)
        getattr(result, field).CopyFrom(told.result)
    return answer.SerializeToString()


def _check(tasks: Sequence[Any]) -> None:
    """Hold the tasks to what TensorFlow Serving takes.

    Raises:
        InvalidRequest: If there are none, or they do not go together.
    """
    if not tasks:
        raise InvalidRequest("there are no tasks; one at least is needed")
    names = list(dict.fromkeys(task.model_spec.name for task in tasks))
    if len(names) > 1:
        raise InvalidRequest(f"the tasks ask '{names[0][:100]}' and '{names[1][:100]}'; all must ask the same model")
    seen: set[str] = set()
    for task in tasks:
        signature = task.model_spec.signature_name
        if task.method_name not in _METHODS:
            known = " and ".join(map(repr, _METHODS))
            raise InvalidRequest(f"a task has the method '{task.method_name[:100]}'; there is {known}")
        if signature in seen:
            raise InvalidRequest(f"two tasks ask the signature '{signature[:100]}'; each may be asked once")
        seen.add(signature)


class _Part:
    """A task, as the method that answers it sees it."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.deadline = call.deadline
        self.on_cancel: Callable[[], object] | None = None
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    @property
    def peer(self) -> str:
        return self._call.peer

    @property
    def tenant(self) -> Tenant | None:
        return self._call.tenant

    @property
    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._call.metadata

    def answered_by(self, endpoint: Answering, request: Request) -> None:
        self._call.answered_by(endpoint, request)

    def reply(self, message: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result(message)

    def fail(self, error: ForebayError, own: Any = None) -> None:
        del own  # the whole call has them
        if not self.answer.done():
            self.answer.set_exception(error)
