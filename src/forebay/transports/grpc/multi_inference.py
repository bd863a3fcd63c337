# SPDX-License-Identifier: Apache-2.0
"""`MultiInference` of TensorFlow Serving: several signatures of a model are asked with the same examples.

Each task is asked as by a `Classify` or `Regress` of its own, and what comes back is put together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from forebay.errors import ForebayError, InvalidRequest
from forebay.protocols.tfserving.messages import SERVING, UNCUT
from forebay.transports.grpc.call_tasks import run_beside
from forebay.transports.grpc.service import Call, Direct
from forebay.transports.grpc.tensor_calls import STATUSES
from forebay.transports.reading_turns import in_turns
from forebay.types.element_limits import ElementLimits
from forebay.types.proto_elements import message_elements
from forebay.types.tensorflow_messages import CLASSIFY, REGRESS

_MOST: Final = ElementLimits(elsewhere=10_000, tensors=10_000)
"""How many elements a message has beside its examples. A model has some signatures, and each is asked once."""
_FIELDS: Final = {CLASSIFY: "classification_result", REGRESS: "regression_result"}
_METHODS: Final = {CLASSIFY: "Classify", REGRESS: "Regress"}

Ask = Callable[[str, Any, Call], Awaitable[Any]]
"""Asks a model by the name of a method, with what its message holds; returns the answer, or the error that it is."""


def multi_inference(ask: Ask) -> Direct:
    """Return the method; `ask` answers its tasks."""

    def method(message: bytes, call: Call) -> None:
        run_beside(partial(_together, message, ask, call), call, STATUSES)

    return method


async def _together(message: bytes, ask: Ask, call: Call) -> None:
    """Ask one task after the other: the first that fails is the answer."""
    await in_turns(message_elements(message, UNCUT.classes().MultiInferenceRequest.DESCRIPTOR, _MOST))
    given = SERVING.parsed("MultiInferenceRequest", message)
    _check(given.tasks)
    answer = SERVING.classes().MultiInferenceResponse()
    for task in given.tasks:
        # What takes the examples of a `Classify` takes those of all: both messages call them alike.
        asked = SimpleNamespace(model_spec=task.model_spec, input=given.input)
        found = await ask(_METHODS[task.method_name], asked, call)
        if isinstance(found, ForebayError):
            call.fail(found, STATUSES)
            return
        result = answer.results.add()
        result.model_spec.CopyFrom(found.model_spec)
        getattr(result, _FIELDS[task.method_name]).CopyFrom(found.result)
    call.reply(answer.SerializeToString())


def _check(tasks: Sequence[Any]) -> None:
    """Hold the tasks to what TensorFlow Serving takes.

    Raises:
        InvalidRequest: If there are none, or they do not go together.
    """
    if not tasks:
        raise InvalidRequest("expected at least one task, got none")
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
