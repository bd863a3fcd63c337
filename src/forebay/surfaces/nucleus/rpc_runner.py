# SPDX-License-Identifier: Apache-2.0
"""Answers gRPC calls with a project's `Handler`, in a worker process.

A plain answer of one message is its bytes. What says more is a list that begins with its kind, as outcome or as part:

    ["begin", metadata]                           before the first message
    ["message", bytes]                            one of a stream of messages
    ["end", code, details, metadata, message, before]
                                                  the status, with the message if there is just one, or None, and with
                                                  all metadata that is to go before it
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from forebay.errors import Cancelled, ModelError
from forebay.surfaces.nucleus.handler import HandlerHost, constructor_arguments, matched, method_parameters
from forebay.surfaces.nucleus.inflow import InflowClient
from forebay.surfaces.nucleus.logs import logger
from forebay.surfaces.nucleus.proto import Rpc, UserService, generated
from forebay.surfaces.nucleus.rpc_context import CANCELLED, INTERNAL, Aborted, Pairs, RpcContext
from forebay.types.call_signature import Arguments
from forebay.types.failures import text_of
from forebay.types.first_use import known
from forebay.types.user_exceptions import answered

if TYPE_CHECKING:
    from forebay.types.call import Item, Outcome
    from forebay.workers.user_calls.coroutines import Coroutines

ABOUT: Final = ""
"""In place of a method: asks which methods want a context."""
INTERNAL_ERROR: Final = "internal server error"
UNSERIALIZABLE: Final = "Failed to serialize response!"
RPC_ARGUMENTS: Final = ("payload", "context")
_END: Final = object()
"""In place of a message: there are no more."""


def build(
    *, handler: str, service: Mapping[str, Any], desk: str, models: Mapping[str, Any] | None = None, **more: Any
) -> RpcRunner:
    """Build the runner; the reference that worker processes are given."""
    runner = RpcRunner(Path(handler), service=msgspec.convert(service, known(UserService)), **more)
    runner.connect(desk, models)
    return runner


class RpcMethod:
    """A method of the handler, and what the service says of it.

    Attributes:
        is_plain: Whether it takes and gives one message, and wants nothing else.
    """

    def __init__(self, function: Callable[..., Any], arguments: Arguments, rpc: Rpc, takes: Any, gives: Any) -> None:
        self.function = function
        self.arguments = arguments
        self.rpc = rpc
        self._takes = takes
        self._gives = gives
        one_each = not rpc.is_asked_in_parts and not rpc.answers_in_parts
        self.is_plain = one_each and arguments.wanted <= {"payload"} and not inspect.iscoroutinefunction(function)

    def answer(self, body: bytes) -> bytes:
        """Answer the message of a plain call."""
        return self.encoded(self.arguments.call(self.function, {"payload": self.decoded(body)}))

    def decoded(self, body: bytes) -> Any:
        """Return the message in these bytes."""
        try:
            return self._takes.FromString(body)
        except DecodeError as error:
            raise _Undecodable from error

    def encoded(self, message: Any) -> bytes:
        """Return the bytes of a message that the method gave."""
        if type(message) is not self._gives:
            raise _Unserializable(f"expected {self.rpc.gives}, got {type(message).__name__}")
        return message.SerializeToString()


class RpcRunner(HandlerHost):
    """Answers calls; the threads of a worker share it."""

    def __init__(self, handler: Path, *, config: str, requirements: str, service: UserService) -> None:
        """Describe handler and service.

        Args:
            config: The project's own `config`, as YAML.
            requirements: Where the project lists its packages.
        """
        super().__init__(handler, config=config, requirements=requirements)
        self._service = service
        self._module: Any = None
        self._inflows: InflowClient | None = None
        self._methods: dict[str, RpcMethod] = {}

    def _answers(self, items: Sequence[Item]) -> Sequence[Outcome] | Iterator[list[Any]]:
        """Answer calls, one after the other; one whose answer is a stream comes alone."""
        first = items[0]
        name = first.params["rpc"]
        if name == ABOUT:
            return [[name for name, method in self._methods.items() if "context" in method.arguments.wanted]]
        method = self._methods[name]
        if method.rpc.answers_in_parts:
            return self._stream(method, first)
        return [self._answer(method, item) for item in items]

    def _load(self) -> None:
        self._module = generated(self._service)  # the handler's file may import it
        super()._load()

    def _make(self, cls: type) -> None:
        plan = constructor_arguments(cls)
        if "proto_module_pb2" not in plan.wanted:
            raise ModelError(
                '"proto_module_pb2" is a required argument, but was not provided; a handler over gRPC is given the '
                "messages of its service so: def __init__(self, config, proto_module_pb2)"
            )
        plans = {rpc.name: _arguments(cls, rpc.name) for rpc in self._service.rpcs}
        if self._desk is not None:
            self._inflows = InflowClient(self._desk)
        handler = self._construct(cls, proto_module_pb2=self._module)
        described = self._module.DESCRIPTOR.services_by_name[self._service.full_name.rpartition(".")[2]]
        for rpc in self._service.rpcs:
            found = described.methods_by_name[rpc.name]
            takes, gives = (message_factory.GetMessageClass(kind) for kind in (found.input_type, found.output_type))
            self._methods[rpc.name] = RpcMethod(getattr(handler, rpc.name), plans[rpc.name], rpc, takes, gives)

    # One message

    def _answer(self, method: RpcMethod, item: Item) -> Outcome:
        if method.is_plain:  # as most are: a message, and an answer
            return answered(
                lambda: method.answer(item.body), lambda error: ["end", *self._status_of(method, error), [], None, []]
            )
        before: list[Pairs] = []
        context = RpcContext(item.params, before.append)
        answer = answered(
            lambda: method.encoded(self._waited(self._call(method, item, context))),
            lambda error: self._fail(method, context, error),
        )
        self._finish(method, context)
        return answer if answer is not None and context.is_plain and not before else context.end(answer, before)

    # Many messages

    def _stream(self, method: RpcMethod, item: Item) -> Iterator[list[Any]]:
        before: list[Pairs] = []
        context = RpcContext(item.params, before.append)
        fail = partial(self._fail, method, context)
        results = answered(lambda: self._results(self._call(method, item, context)), fail)
        message: Any = None  # as where something has failed
        try:
            while results is not None:
                message = answered(lambda: next(map(method.encoded, results), _END), fail)
                while before:
                    yield [["begin", before.pop(0)]]
                if message is None or message is _END:
                    break
                yield [["message", message]]
        finally:
            close = getattr(results, "close", None)
            if close is not None:
                answered(close, fail if message is not None else lambda _: None)
            self._finish(method, context)
        yield [context.end(None, [])]

    def _results(self, results: Any) -> Iterator[Any]:
        """Return an iterator of what a method gives; that of a coroutine is driven on this thread's loop."""
        results = self._waited(results)
        return _Followed(self._coroutines, aiter(results)) if hasattr(results, "__aiter__") else iter(results)

    def _call(self, method: RpcMethod, item: Item, context: RpcContext) -> Any:
        if method.rpc.is_asked_in_parts:
            assert self._inflows is not None
            payload: Any = self._inflows.messages(item.params["stream"], method.decoded)
        else:
            payload = method.decoded(item.body)
        return method.arguments.call(method.function, {"payload": payload, "context": context})

    def _fail(self, method: RpcMethod, context: RpcContext, error: BaseException) -> None:
        said_why = isinstance(error, _Unserializable) and context.code()
        if not isinstance(error, Aborted) and not said_why:
            context.fail(*self._status_of(method, error))

    @staticmethod
    def _finish(method: RpcMethod, context: RpcContext) -> None:
        def report(error: BaseException) -> None:
            logger.error("a callback of %s failed: %s", method.rpc.name, text_of(error), exc_info=error)

        for callback in context.finish():
            answered(callback, report)

    @staticmethod
    def _status_of(method: RpcMethod, error: BaseException) -> tuple[int, str]:
        if isinstance(error, Cancelled):
            return CANCELLED, error.message
        if isinstance(error, _Undecodable):
            return INTERNAL, "Exception deserializing request!"
        logger.error("%s: %s", method.rpc.name, text_of(error), exc_info=error)
        return INTERNAL, UNSERIALIZABLE if isinstance(error, _Unserializable) else INTERNAL_ERROR


class _Undecodable(Exception):
    """What a client sent is not a message of the type that its method takes."""


class _Unserializable(Exception):
    """What a method gave is not a message of the type that it says it gives."""


class _Followed:
    """An asynchronous iterator as a plain one."""

    def __init__(self, coroutines: Coroutines, results: Any) -> None:
        self._coroutines = coroutines
        self._results = results

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._coroutines.run(anext(self._results))
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        close = getattr(self._results, "aclose", None)
        if close is not None:
            self._coroutines.run(close())


def _arguments(cls: type, name: str) -> Arguments:
    """Return what the method for an RPC wants; raises ModelError if there is none, or it wants something else."""
    if not callable(getattr(cls, name, None)):
        raise ModelError(
            f"method {name} hasn't been defined in the Handler class; define one called {name} to match the RPC method "
            "from the protobuf definition"
        )
    _, parameters = method_parameters(cls, name)
    found, unknown = matched(parameters, {name: name for name in RPC_ARGUMENTS}, RPC_ARGUMENTS)
    if unknown:
        quoted = " and ".join(f'"{one}"' for one in unknown)
        what = "argument" if len(unknown) == 1 else "arguments"
        raise ModelError(
            f"{what} {quoted} cannot be used when the grpc protocol is enabled; the arguments of {name} may be "
            f"{', '.join(RPC_ARGUMENTS)}"
        )
    return found
