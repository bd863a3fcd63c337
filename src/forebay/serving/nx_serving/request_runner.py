# SPDX-License-Identifier: Apache-2.0
"""A serving behind an endpoint: bodies in, encoded answers out.

A sample is an array, as nested lists, or a dict of arrays; in msgpack also a tensor, a map of `dtype`, `shape` and the
bytes of its `data`. Without a client preprocessing a sample is one row, and so is its answer. A request may be a list
of samples (`ROWS`), and is answered with one. Where protocols speak tensors, a call has any number of rows: a tensor is
an array, several are a dict of arrays, and so are the answers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.arrays import json_numbers
from forebay.arrays.array_batch import Batch
from forebay.arrays.libraries import find_kind
from forebay.arrays.tree_rows import concatenate, to_host
from forebay.arrays.tree_structure import map_leaves
from forebay.batching.queue import BatchConfig
from forebay.errors import BadOutcome, BatchMismatch, ForebayError, InvalidRequest, ServingCrashed
from forebay.observe.logs.throttled_log import ThrottledLog
from forebay.serving.models.array_types import array_of
from forebay.serving.models.json_rows import row_encoder
from forebay.serving.models.model import load_module
from forebay.serving.models.schema import ONLY_AS_KEYS, wrong_key
from forebay.serving.models.tensor_codec import TensorCodec, TensorSide, plain_array
from forebay.serving.nx_serving import caller
from forebay.serving.nx_serving.dispatch import Dispatch, Submission, Work
from forebay.serving.nx_serving.packed_trees import LEARNED
from forebay.serving.nx_serving.serving_options import options_of, partitions_of
from forebay.serving.tensor_face import TENSORS, TensorFace, tensors_of
from forebay.types.call import ROWS, Failure, Item, Media, Outcome, written_in
from forebay.workers.runner import Runner, WorkerContext
from forebay.workers.user_calls.user_code import attempt

log = logging.getLogger("forebay.requests")

if TYPE_CHECKING:
    from forebay.serving.nx_serving.definition import Serving
    from forebay.serving.nx_serving.execution import Execution

MUCH_ROOM: Final = 1 << 16
"""Characters that an array of texts may have room for, however few they are."""
MOST_ROOM: Final = 8
"""And how many times as much as the texts have, where these are more."""


class RequestRunner(Runner):
    """Runs requests on one partition of a serving."""

    def __init__(self, serving: Serving[Any, Any], workers: int, batch_size: int, *, has_device: bool = False) -> None:
        """Prepare to serve; `open` initialises the module.

        Args:
            workers: How many of these runners there are, each a partition.
            batch_size: Rows of a batch at most.
            has_device: Whether the worker was given a device, which then stands above that of the partition.
        """
        self._serving = serving
        self._settings = serving.settings
        self._options = options_of(serving.settings, {})
        self._workers = workers
        self._batch_size = batch_size
        self._has_device = has_device
        self._partition = 0
        self._untaken = ThrottledLog(log)
        self._execution: Execution | None = None

    def open(self, ctx: WorkerContext) -> None:
        """Initialise the module; raises as `Serving.initialise` does."""
        options = self._options
        partitions = partitions_of(self._settings, options)
        if len(partitions) < self._workers:
            partitions = [partitions[0]] * self._workers
        self._partition = ctx.index
        if self._has_device:
            partitions = [{**one, "device": ctx.device} for one in partitions]
        pad_to = self._batch_size if options.pad_to_batch_size else None
        self._execution = self._serving.initialise("process", partitions, pad_to)

    def run(self, items: Sequence[Item]) -> Sequence[Outcome] | Iterator[Sequence[Any]]:
        """Run the requests in as few batches as their rows need."""
        if self._settings.streaming is not None:
            return self._stream(items)
        dispatch = Dispatch(BatchConfig(max_size=self._batch_size, capacity=1 << 62, idle="wait"))
        asked = [self._ask(dispatch, item) for item in items]
        while (work := dispatch.take(1.0)) is not None:
            self._execute(dispatch, work)
        return [
            one if isinstance(one, Failure) else attempt(self._answer, item, one)
            for item, one in zip(items, asked, strict=True)
        ]

    def close(self) -> None:
        """Let go of the module."""
        self._execution = None

    def _ask(self, dispatch: Dispatch, item: Item) -> list[tuple[list[Submission], Any]] | Failure:
        """Prepare one request and hand in the batches of each of its values."""
        prepared = attempt(self._prepared, item)
        if type(prepared) is Failure:
            return prepared
        asked = [([Submission(batch, None) for batch in batches], info) for batches, info in prepared]
        for calls, _ in asked:
            for call in calls:
                dispatch.offer(call, 0.5)
        return asked

    def _prepared(self, item: Item) -> list[tuple[list[Batch], Any]]:
        has_rows = self._settings.client_preprocessing is None
        return [self._prepared_one(item, value) for value in _read(item, has_rows=has_rows)]

    def _prepared_one(self, item: Item, value: Any) -> tuple[list[Batch], Any]:
        settings = self._settings
        is_tensors = item.params["in"] == TENSORS
        if settings.client_preprocessing is None:
            given, info = (Batch.concatenate if is_tensors else Batch.stack)([value]), "client_info"
        else:
            given, info = self._given(value)
        limit = self._batch_size
        if isinstance(given, Batch):
            batches = [caller.whole(settings, given, limit)]
        else:
            batches = list(caller.each(settings, given, limit))
        known = self._options.batch_keys
        if "key" in item.params:
            key = query_key(item.params, known)
            batches = [batch.key(key) for batch in batches]
        for batch in batches:
            if batch.batch_key not in known:
                msg = f"unknown batch key: {batch.batch_key!r} (expected one of {list(known)!r}); name one as ?key="
                raise InvalidRequest(msg)
        return batches, info

    def _given(self, value: Any) -> tuple[Any, Any]:
        """Run the client preprocessing.

        Raises:
            InvalidRequest: What it raised says that it does not take such a body.
        """
        try:
            return caller.prepare(self._settings, value)
        except (TypeError, LookupError, ValueError, AttributeError) as error:
            self._untaken.warning("a client preprocessing did not take its input", error=error)
            raise InvalidRequest(f"the client preprocessing does not take this body: {type(error).__name__}") from error

    def _execute(self, dispatch: Dispatch, work: Work) -> None:
        execution = self._execution
        assert execution is not None
        try:
            batch = work.batch()
        except BatchMismatch:
            for alike in work.alike():
                self._execute(dispatch, alike)
            return
        executed = attempt(lambda: execution.run(batch, self._partition).own())
        if type(executed) is not Failure:
            dispatch.finish(work, executed)
        elif isinstance(executed.error, BadOutcome):
            dispatch.fail(work, executed.error)
        else:
            failed = executed.error
            dispatch.fail(work, ServingCrashed(failed.message, trace=failed.trace))

    def _answer(self, item: Item, asked: list[tuple[list[Submission], Any]]) -> Outcome:
        answers = [self._answer_one(item, calls, info) for calls, info in asked]
        return answers if ROWS in item.params else answers[0]

    def _answer_one(self, item: Item, calls: list[Submission], info: Any) -> Any:
        results = [call.result() for call in calls]
        executed = concatenate([output for output, _ in results]), results[-1][1]
        answer = caller.finish(self._settings, executed, info)
        if item.params["out"] == TENSORS:
            return _written_tensors(answer, item.params)
        if self._settings.client_preprocessing is None and self._settings.client_postprocessing is None:
            answer = _first_row(answer)
        if type(answer) is Media:
            return answer
        return _encode(answer, written_in(item.params))

    def _stream(self, items: Sequence[Item]) -> Iterator[Sequence[Any]]:
        """Yield the events of one request; streams do not share batches, as each is consumed at its own pace."""
        (item,) = items
        assert self._execution is not None
        ((batches, info),) = self._prepared(item)
        pieces = (piece for batch in batches for piece in caller.cut(batch, self._batch_size))
        events = self._serving.events(pieces, self._execution, self._partition)
        settings = self._settings
        if settings.client_preprocessing is None and settings.client_postprocessing is None:
            events = ((kind, _first_row(output), *metadata) for kind, output, *metadata in events)
        for event in caller.finish_stream(settings, events, info):
            is_tensors = item.params["out"] == TENSORS
            yield [_written_tensors(event[1], item.params) if is_tensors else _encode(event, "json")]


def from_file(path: str, name: str, workers: int, batch_size: int, *, has_device: bool = False) -> RequestRunner:
    """Build the runner of a serving in a file."""
    return RequestRunner(getattr(load_module(Path(path)), name), workers, batch_size, has_device=has_device)


def _read(item: Item, *, has_rows: bool) -> list[Any]:
    """Read the values of a request: each is to be prepared, and answered, by itself; of tensors perhaps some rows."""
    if item.params["in"] == TENSORS:
        return [_read_tensors(item, item.size if has_rows else None)]
    bodies = item.body if ROWS in item.params else [item.body]
    return [_decode(body, item.params["in"]) for body in bodies]


def _decode(body: Any, format: str) -> Any:
    """Read a body; raises an `InvalidRequest` if it is malformed, or its arrays are."""
    try:
        value = msgspec.json.decode(body) if format == "json" else msgspec.msgpack.decode(body)
        return _arrays(value)
    except ForebayError:
        raise
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"body: expected an array or an object of arrays: {error}") from error


def face_of(serving: Serving[Any, Any]) -> TensorFace:
    """Return what protocols that speak tensors must know: a serving takes any, in rows if nothing else reads them."""
    return TensorFace(is_open=True, has_rows=serving.settings.client_preprocessing is None)


def _read_tensors(item: Item, rows: int | None) -> Any:
    tensors = tensors_of(item.params["given"], item.body)
    # Copied, since the function owns what it gets and may write into it.
    arrays = {one.name: plain_array(one, rows).copy() for one in tensors}
    return arrays if len(arrays) > 1 else next(iter(arrays.values()))


def _written_tensors(answer: Any, params: Mapping[str, Any]) -> list[Any]:
    host = map_leaves(_numpys, to_host(answer))
    fields = cast("Mapping[str, Any]", host) if isinstance(host, Mapping) else {"output": host}
    return _CODEC.encode([fields], params)


_CODEC: Final = TensorCodec(TensorSide(), TensorSide(), has_rows=False)


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if fields.keys() == {"dtype", "shape", "data"} and isinstance(fields["data"], bytes):
            return _array_of(fields)
        return {name: _arrays(field) for name, field in fields.items()}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        array = array_of(items)
        if not array.dtype.hasobject:
            return array
        # Lists of objects are for a preprocessing to read, and numbers beside texts are not texts.
        return _wide(array) if all(isinstance(one, str | bytes) for one in array.flat) else items
    return value


def _wide(texts: Any) -> Any:
    """Return texts as NumPy keeps them, each with room for the longest, or as they are where that is far too much."""
    import numpy as np

    lengths = [len(text) for text in texts.flat]
    room = len(lengths) * max(lengths)
    return np.asarray(texts.tolist()) if room <= max(MUCH_ROOM, MOST_ROOM * sum(lengths)) else texts


def _array_of(tensor: Mapping[str, Any]) -> Any:
    """Return the array that a tensor in msgpack is; raises an `InvalidRequest` if its fields are not those of one."""
    import numpy as np

    try:
        dtype = np.dtype(tensor["dtype"])
        if dtype.hasobject or dtype.type is np.void or dtype.kind in "mM":
            raise InvalidRequest(f"a tensor of {dtype} is not taken; numbers and texts are")
        array = np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"a tensor has no such type, or is not of its shape: {error}") from error
    if list(array.shape) != tensor["shape"]:
        msg = f"a tensor has the shape {tensor['shape']!r:.100}; its axes are given as whole numbers from 0 on"
        raise InvalidRequest(msg)
    return array


def _first_row(output: Any) -> Any:
    return map_leaves(lambda leaf: leaf[0], to_host(output))


def _encode(answer: Any, format: str) -> bytes:
    if format == "json":
        return msgspec.json.encode(answer, enc_hook=_listed)
    if format == "rows":
        return _rows(answer)
    return msgspec.msgpack.encode(answer, enc_hook=_tensor)


def _listed(value: Any) -> Any:
    if type(value) in ONLY_AS_KEYS:
        raise BadOutcome(wrong_key(value))
    array = _on_host(value)
    if array.ndim:
        return array.tolist()
    if array.dtype.kind == "c":
        msg = "the answer holds complex numbers, which JSON cannot say; return their real and imaginary parts"
        raise BadOutcome(msg)
    return _number(array)


def _numbers(value: Any) -> Any:
    array = _on_host(value)
    return msgspec.Raw(json_numbers.written(array)) if array.dtype.kind in json_numbers.KINDS else _listed(value)


_rows: Final = row_encoder(None, _numbers)


def _tensor(value: Any) -> Any:
    array = _on_host(value)
    dtype = array.dtype
    if dtype.hasobject or dtype.names:  # its bytes mean nothing elsewhere, nor does its type
        return array.tolist()
    if array.ndim == 0 and dtype.kind != "c":
        return _number(array)
    array = _numpys(array)
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def _numpys(array: Any) -> Any:
    """Return numbers of types that only another library gives a meaning to, such as bfloat16, as those of numpy."""
    import numpy as np

    if array.dtype.isbuiltin != LEARNED:
        return array
    return array.astype("i1" if np.can_cast(array.dtype, np.int8) else "f4")


def _number(array: Any) -> Any:
    """Return the only element as Python has it."""
    return float(array) if array.dtype.kind == "f" else array.item()  # of a longdouble the item is none of Python's


def _on_host(value: Any) -> Any:
    kind = find_kind(value)
    if kind is None:
        msg = f"the answer holds a {type(value).__name__}, which cannot be encoded; return arrays, numbers and texts"
        raise BadOutcome(msg)
    return kind.host(value)


def query_key(params: Mapping[str, Any], batch_keys: Sequence[Any]) -> Any:
    """Return the batch key that a request names in its query, in the type it was declared with.

    Raises:
        InvalidRequest: There is no such key.
    """
    named = params["key"]
    for key in batch_keys:
        if str(key) == named:
            return key
    raise InvalidRequest(f"unknown batch key: {named[:100]!r} (expected one of {list(batch_keys)!r})")
