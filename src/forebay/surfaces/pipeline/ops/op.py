# SPDX-License-Identifier: Apache-2.0
"""The classes that projects inherit: ops as data, with hooks that do what they did in the original.

An op knows nothing of queues, threads or sockets. What its constructor was given is kept unchanged; it is interpreted
once the configuration is known. The hooks can be called in the form of every generation, because subclasses call them
through `super()` in the form they know.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

from forebay.errors import ConfigError
from forebay.surfaces.pipeline.codes import CustomExceptionCode, error
from forebay.surfaces.pipeline.ops import hooks, packing

REQUEST: Final = "@DAGExecutor"
"""What ops that come first call the request among their inputs."""

_numbers = itertools.count()


class Op:
    """One step of a pipeline.

    The hooks are `preprocess` and `postprocess` for one sample each and `process` for a batch. All three may be written
    in the form of any version of the original; which one is read off the signature.

    Attributes:
        name: What its successors call it among their inputs.
        concurrency_idx: Number of the worker process, from 0; None in threads.
        client: What `process` asks for predictions; None without a model.
        store: For values that are too large to be handed on: `put(value)` gives a key, `get(key)` the value.
        local_service_handler: A model of one's own, given to the constructor or set in `init_op`: an object with
            `predict(feed, fetch, batch, log_id)`, or with `get_client(concurrency_idx)` that returns one.
        concurrency, client_type: What the constructor was given.
        fetch_names: The model's results that are wanted; all of them if there is none.
        feeds_list: Whether `process` is given a dict for each sample instead of one for all; set by the server.
        is_tensor_format: Whether another pipeline is sent tensors instead of texts.
        given: What the constructor was given; None stands for nothing.
        readers: The ops that have this one among their input ops, in the order they were made.
    """

    concurrency_idx: int | None = None
    client: Any = None
    store: Any = None
    feeds_list: bool = False
    is_tensor_format: bool = False

    def __init__(  # noqa: PLR0913, PLR0917 - the original's signature
        self,
        name: str | None = None,
        input_ops: Op | Sequence[Op] | None = None,
        server_endpoints: Sequence[str] | None = None,
        fetch_list: Sequence[str] | None = None,
        client_config: Any = None,
        client_type: str | None = None,
        concurrency: int | None = None,
        timeout: float | None = None,
        retry: int | None = None,
        batch_size: int | None = None,
        auto_batching_timeout: float | None = None,
        local_service_handler: Any = None,
        jump_to_ops: Op | Sequence[Op] | None = None,
    ) -> None:
        """Keep what is given; None leaves it to the configuration.

        Args:
            name: Unique in the pipeline; None makes one up.
            input_ops: The ops whose results it reads.
            server_endpoints: Addresses of remote model servers.
            fetch_list: The model's results that are wanted.
            client_config: Path of the description of the remote model's inputs and outputs.
            client_type: `brpc`, `grpc`, `local_predictor` or `pipeline_grpc`.
            concurrency: Workers.
            timeout: Milliseconds a call of `process` may take; 0 or less for any time.
            retry: Calls of `process` in all; again only after a time-out. 0, the original's default, means 1.
            batch_size: Samples that may share a call of `process`.
            auto_batching_timeout: Milliseconds a sample waits for others to share a batch with.
            local_service_handler: A model of one's own.
            jump_to_ops: Ops a result may be sent to instead of the next ones; not supported, so that the start fails.

        Raises:
            ConfigError: If `input_ops` or `jump_to_ops` holds something other than an op.
        """
        self.name = f"Op{next(_numbers)}" if name is None else name
        self.local_service_handler = local_service_handler
        self.fetch_names = list(fetch_list or ())
        self.concurrency, self.client_type = concurrency, client_type
        self.given: dict[str, Any] = {
            "server_endpoints": server_endpoints,
            "fetch_list": fetch_list,
            "client_config": client_config,
            "client_type": client_type,
            "concurrency": concurrency,
            "timeout": timeout,
            "retry": 1 if retry == 0 else retry,
            "batch_size": batch_size,
            "auto_batching_timeout": auto_batching_timeout,
        }
        self.readers: list[Op] = []
        self._input_ops: list[Op] = []
        self.set_input_ops(input_ops)
        self.set_jump_to_ops(jump_to_ops)

    def init_op(self) -> None:
        """Load resources; once for an op in threads, once in each process of an op in processes."""

    def preprocess(self, input_dicts: Mapping[str, Any], data_id: Any = None, log_id: Any = None) -> Any:
        """Prepare one sample.

        Args:
            input_dicts: The results of the ops before by their names.
            data_id: Number of the request in this server.
            log_id: Number the client gave it.

        Returns:
            What `process` gets: a dict, or a list of dicts that it gets one after the other. With ids, as later
            versions call it: that, whether to skip `process`, a product error code or None, and its text.

        Raises:
            ForebayError: If there are several inputs, which only the project can make one of.
        """
        if len(input_dicts) != 1:
            text = f"{self._log('this Op has multiple previous inputs')} ({', '.join(input_dicts)}). "
            raise error(CustomExceptionCode.NOT_IMPLEMENTED.value, text + "Please override preprocess.")
        (found,) = input_dicts.values()
        return found if data_id is None and log_id is None else (found, False, None, "")

    def process(self, feed_batch: Sequence[Any], typical_logid: int = 0) -> Any:
        """Ask the model about a batch.

        Args:
            feed_batch: A list with one dict, the samples of the batch stacked; or with a dict for each of them where
                the op is configured that way.
            typical_logid: Log id of the first sample, or its data id where it has none.

        Returns:
            The model's results by their names; for ops of v0.7 and later with an error code and its text.

        Raises:
            ForebayError: If the model does not take what it is given, or gives nothing.
        """
        found = hooks.predict(self, feed_batch, typical_logid)
        return found if hooks.generation_of(self) in {0, 1} else (found, CustomExceptionCode.OK.value, "")

    def postprocess(self, input_dicts: Mapping[str, Any], fetch_data: Any, *ids: Any) -> Any:
        """Turn one sample's share of the results into what the next ops read.

        Args:
            input_dicts: What `preprocess` saw, the same object.
            fetch_data: The sample's share; what `preprocess` returned if `process` was not called.
            ids: Nothing, the log id, or data id and log id, by version.

        Returns:
            A dict. With ids also a product error code or None, and its text.
        """
        return (fetch_data, None, "") if ids else fetch_data

    def set_dynamic_shape_info(self) -> None:
        """Describe shapes to an accelerator; called before the model is loaded."""

    def set_pack_tensor_format(self, is_tensor_format: bool = False) -> None:
        """Send tensors instead of texts to another pipeline (`client_type` `pipeline_grpc`)."""
        self.is_tensor_format = is_tensor_format

    def check_jumping(self, postped_data: Any) -> bool:
        """Tell whether a result goes to `jump_to_ops`; never asked, because such ops are refused."""
        return False

    def get_input_ops(self) -> list[Op]:
        """Return the ops whose results it reads."""
        return list(self._input_ops)

    def set_input_ops(self, ops: Op | Sequence[Op] | None) -> None:
        """Read the results of these ops, and no others.

        Raises:
            ConfigError: If one is something else.
        """
        found = _ops(self.name, "input_ops", ops)
        for op in self._input_ops:
            op.readers.remove(self)
        self._input_ops = found
        for op in found:
            op.readers.append(self)

    def set_jump_to_ops(self, ops: Op | Sequence[Op] | None) -> None:
        """Say where a result may be sent to instead of the next ops; not supported, so that the start fails.

        Raises:
            ConfigError: If one is not an op.
        """
        self._jump_to_ops = _ops(self.name, "jump_to_ops", ops)

    def get_jump_to_ops(self) -> list[Op]:
        """Return the ops a result may be sent to instead of the next ones."""
        return list(self._jump_to_ops)

    @property
    def _fetch_names(self) -> list[str]:
        return self.fetch_names

    @_fetch_names.setter
    def _fetch_names(self, names: Sequence[str]) -> None:
        self.fetch_names = list(names)

    def _log(self, info_str: Any) -> str:
        return f"[{self.name}] {info_str}"


class RequestOp(Op):
    """The first op: reads requests.

    Attributes:
        request_parse: How the default `unpack_request_package` reads texts; set by the server.
    """

    request_parse: packing.RequestParse = "raw"

    def __init__(self) -> None:
        super().__init__(name=REQUEST)
        self.init_op()

    def unpack_request_package(self, request: Any) -> Any:
        """Read a request.

        Args:
            request: `key`, `value` and `tensors`, with `name`, `method`, `logid` and `clientip`.

        Returns:
            A dict; or that, the log id, a product error code or None, and its text.

        Raises:
            ForebayError: If keys and values do not come in pairs, or a tensor cannot be read.
        """
        return packing.unpack(request, self.request_parse), getattr(request, "logid", 0), None, ""

    def proto_tensor_2_numpy(self, tensor: Any) -> tuple[Any, Any]:
        """Read one tensor of a request, for an `unpack_request_package` of one's own.

        Returns:
            Its array or text, and its levels of detail or None.

        Raises:
            ForebayError: If it cannot be read.
        """
        from forebay.surfaces.pipeline.protocol import tensors

        return tensors.unpack(tensor)


class ResponseOp(Op):
    """The last op: writes answers.

    Attributes:
        response_class: Message that the default `pack_response_package` fills; set by the server.
        is_pack_tensor: Whether it answers with tensors instead of texts.
    """

    response_class: Any = None

    def __init__(self, input_ops: Op | Sequence[Op] | None = None) -> None:
        """Load its resources.

        Args:
            input_ops: The one op whose result is the answer.

        Raises:
            ConfigError: If it is not an op.
        """
        super().__init__(name="@ResponseOp", input_ops=input_ops)
        self.is_pack_tensor = False
        self.init_op()

    def set_pack_format(self, isTensor: bool = False) -> None:
        """Answer with tensors instead of texts."""
        self.is_pack_tensor = isTensor

    def pack_response_package(self, channeldata: Any) -> Any:
        """Write an answer.

        Args:
            channeldata: The last op's result, or the error.

        Returns:
            A response message.
        """
        return packing.pack(channeldata, self.response_class, as_tensors=self.is_pack_tensor)


def _ops(name: str, argument: Literal["input_ops", "jump_to_ops"], given: Any) -> list[Op]:
    if given is None:
        return []
    found = [given] if isinstance(given, Op) else given
    if not isinstance(found, (list, tuple)):
        raise ConfigError(f"op '{name}': {argument}: expected an Op or a list of Ops, got {type(found).__name__}")
    for one in cast("Sequence[Any]", found):
        if not isinstance(one, Op):
            raise ConfigError(f"op '{name}': {argument}: expected Ops, got {type(one).__name__} in the list")
    return list(cast("Sequence[Op]", found))
