# SPDX-License-Identifier: Apache-2.0
"""Runs a `Model` in a worker: decode each sample, predict the batch, encode each result.

Samples are decoded and results encoded here, next to the model, so that the event loop moves bytes only. One list
comprehension each way is the common case; only a batch in which something fails is looked at sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import BadOutcome, ForebayError
from forebay.serving.models.annotations import io_types, media_in_parts
from forebay.serving.models.answer_writing import write_result
from forebay.serving.models.batch_runner import BatchRunner, Samples
from forebay.serving.models.further_methods import CALL, ModelMethod, methods_of
from forebay.serving.models.model import Model, load_module, models_in, settings_of
from forebay.serving.models.outputs import declared_of
from forebay.serving.models.sample_errors import FILE_BODY, ONE_BODY, refusal
from forebay.serving.models.schema import FORMATS, WRITTEN, in_one_line, part_encoder
from forebay.serving.models.tensor_codec import TensorCodec, codec_for
from forebay.serving.tensor_face import TENSORS
from forebay.types.call import ROWS, Failure, Item, Last, Media, Outcome, written_in
from forebay.types.failures import failure_of, text_of, trace_of
from forebay.types.model_answer import Answer
from forebay.workers.runner import Runner, WorkerContext
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.workers.user_calls.joint_streams import JointStreams


def from_file(
    path: str, name: str, *, isolate_errors: bool = False, files: str | None = None, package: str = ""
) -> ModelRunner | MethodsRunner:
    """Build the runner of a model class in a file; the reference that worker processes are given."""
    module = load_module(Path(path), package)
    return runner_for(models_in(module, name)[0], isolate_errors=isolate_errors, files=files)


def runner_for(
    model_class: type[Model], *, isolate_errors: bool = False, files: str | None = None
) -> ModelRunner | MethodsRunner:
    """Build the runner of a model class, with all methods that answer requests.

    Args:
        isolate_errors: Halve batches that fail as a whole.
        files: The folder that its `load` is given, if it has a repository.
    """
    predict = ModelRunner(model_class, isolate_errors=isolate_errors, files=files)
    methods = methods_of(model_class)
    if not methods:
        return predict
    others = {one.name: ModelRunner(model_class, isolate_errors=isolate_errors, method=one) for one in methods}
    return MethodsRunner(predict, others)


_SPECIAL: Final = frozenset({Answer, Failure, Last, Media, msgspec.Raw, type(None)})
"""What is not a part of a stream but stands in the place of one, or is one that somebody else has written."""
_PLAIN: Final = frozenset({str, int, float, bool, dict, list, tuple})
"""What is a part for certain."""


class ModelRunner(BatchRunner):
    """A `Runner` for one method of a model class. Bodies and results are bytes in the formats that `params` names."""

    def __init__(
        self,
        model_class: type[Model],
        *,
        isolate_errors: bool = False,
        method: ModelMethod | None = None,
        files: str | None = None,
    ) -> None:
        """Read the class; `open` makes the model.

        Args:
            isolate_errors: Halve batches that fail as a whole, also if the class does not ask for it.
            method: What answers; None is `predict`.
            files: The folder that `load` is given; None if it takes none.
        """
        settings, name = settings_of(model_class), "predict"
        if method is not None:
            settings, name = settings.of(method), method.name
            isolate_errors = isolate_errors and not method.streams
        super().__init__(model_class, settings, isolate_errors=isolate_errors, method=name, files=files)
        given, answer = io_types(model_class, method)
        self._given = given
        self._no_array = FILE_BODY if hasattr(model_class, "tensor_codecs") else ONE_BODY
        self._reader = given.reader
        self._encode = {name: answer.encoder(name) for name in WRITTEN}
        if settings.streams:
            self._encode["json"] = part_encoder(answer)
        self._declared = declared_of(answer) if model_class.check_outputs else None
        takes_media = answer.has_media or answer.annotation is Any or not model_class.check_outputs
        self._no_media = media_in_parts(batchable=settings.batchable, streams=settings.streams)
        if not self._no_media and not takes_media:
            self._no_media = "it does not declare any; annotate them, as in list[dict | forebay.Media]"
        self._batchable = self._settings.batchable
        self._name = "" if method is None else method.name
        self._types = given, answer
        if given.in_pieces:
            self._is_alone, self._in_parts = True, False
        self.borrows_input = model_class.borrows_input or not given.refers

    @cached_property
    def _tensors(self) -> TensorCodec:
        """What reads and writes tensors."""
        return codec_for(self._class, *self._types, self._name)

    def _decoded(self, items: Sequence[Item]) -> Samples:
        if len(items) > 1 and items[0].params["in"] == TENSORS:
            together = caught(self._tensors.decode_all, items)[0]
            if together is not None:
                each = [at for at, item in enumerate(items) for _ in range(item.size)]
                return Samples(items, together, each, {}, _common_params(items))
        if not self._batchable:  # what has several samples in a list, or tensors, fails there at once
            params = _common_params(items)
            decoded, error = caught(self._decoded_at_once, items, params)
            if error is None:
                return Samples(items, decoded, None, {}, params)
        samples: list[Any] = []
        owners: list[int] = []
        failures: dict[int, Failure] = {}
        for owner, item in enumerate(items):
            if item.params["in"] == TENSORS:
                found, error = caught(self._tensors.decode, item.body, item.params, item.size)
                if error is not None:
                    failures[owner] = failure_of(error)
                else:
                    samples += found
                    owners += [owner] * len(found)
                continue
            is_array = type(item.body) is list
            rows = item.body if is_array else (item.body,)
            decode = self._reader(item.params)
            found: list[Any] = []
            for number, row in enumerate(rows):
                sample, error = caught(decode, row)
                if error is not None:
                    failures[owner] = failure_of(
                        refusal(error, row, number if is_array else None, self._given, no_array=self._no_array)
                    )
                    break
                found.append(sample)
            else:
                samples += found
                owners += [owner] * len(found)
        error = None  # its frames hold this one, and with it the bodies: a circle
        return Samples(items, samples, owners, failures)

    def _decoded_at_once(self, items: Sequence[Item], params: Mapping[str, Any] | None) -> list[Any]:
        if params is not None:
            decode = self._reader(params)
            return [decode(item.body) for item in items]
        return [self._reader(item.params)(item.body) for item in items]

    def _encoded(self, batch: Samples) -> Sequence[Outcome]:
        items = batch.items
        params = None if batch.failures or self._batchable else batch.params
        if params is not None and params["out"] != TENSORS and ROWS not in params:
            encoded = caught(self._encoded_at_once, params["out"], batch.samples)[0]
            if encoded is not None:
                return encoded
        if not batch.failures and len(items) > 1 and items[0].params["out"] == TENSORS:
            together = caught(self._tensors_at_once, batch)[0]
            if together is not None:
                return together
        outcomes: list[Any] = [[] for _ in items]
        for owner, result in zip(batch.owners, batch.samples, strict=True):
            if owner in batch.failures:
                continue
            written = self._written(result, written_in(items[owner].params))
            if type(written) is Failure:
                batch.failures[owner] = written
            else:
                outcomes[owner].append(written)
        for owner, failure in batch.failures.items():
            outcomes[owner] = failure
        return [
            outcome if type(outcome) is Failure else self._whole(item, outcome)
            for item, outcome in zip(items, outcomes, strict=True)
        ]

    def _tensors_at_once(self, batch: Samples) -> list[Any] | None:
        """Encode results that are certainly right, if they are alike."""
        if self._declared is not None and not self._declared.fits(batch.samples):
            return None
        return self._tensors.encode_all(batch.samples, batch.items)

    def _whole(self, item: Item, written: list[Any]) -> Outcome:
        """Return the outcome of an item, made of what its samples became."""
        if item.params["out"] == TENSORS:
            return self._as_tensors(written, item.params)
        return written if type(item.body) is list else written[0]

    def _as_tensors(self, results: Sequence[Any], params: Mapping[str, Any]) -> Outcome:
        outcome, error = caught(self._tensors.encode, results, params)
        if error is None:
            return outcome
        failure, error = self._unwritten(error), None  # see `_decoded`
        return failure

    def _unwritten(self, error: BaseException) -> Failure:
        if isinstance(error, ForebayError):
            return failure_of(error)
        msg = f"a result of {self._class.__name__} cannot be encoded: {text_of(error)}"
        return failure_of(BadOutcome(msg, trace=trace_of(error)))

    def _parts(self, batch: Samples, given: list[Any]) -> Sequence[Any]:
        """Encode the parts of one step; one that cannot be encoded fails its own sample."""
        parts: list[Any] = [None] * len(batch.items)
        for owner, part in zip(batch.owners, given, strict=True):
            is_done = part is None or type(part) is Failure
            if is_done:
                parts[owner] = part
                continue
            parts[owner] = self.write(part, batch.items[owner].params)
        return parts

    def write(self, part: Any, params: Mapping[str, Any]) -> Any:
        """Encode a part of a stream."""
        if params["out"] != TENSORS:
            written = self._written(part, "json")
            return in_one_line(written) if type(part) is msgspec.Raw and type(written) is bytes else written
        written = self._written(part, TENSORS)
        return written if type(written) is Failure else self._as_tensors([written], params)

    def writer(self, asked: Sequence[Mapping[str, Any]]) -> Callable[[Sequence[Any]], Sequence[bytes] | None] | None:
        """Return what encodes a part for each of these, where all want JSON; see `Stepping.writer`."""
        if self._postprocess is not None or TENSORS in [params["out"] for params in asked]:
            return None
        return self._written_at_once

    def _written_at_once(self, parts: Sequence[Any]) -> Sequence[bytes] | None:
        """Encode parts that are certainly right."""
        kinds = set(map(type, parts))
        if not kinds <= _PLAIN and (_SPECIAL & kinds or any(issubclass(kind, BaseException) for kind in kinds)):
            return None
        return caught(self._encoded_at_once, "json", list(parts))[0]

    def _encoded_at_once(self, format: str, results: list[Any]) -> list[bytes] | None:
        """Encode results that are certainly right."""
        if self._declared is not None and not self._declared.fits(results):
            return None
        encode = self._encode[format]
        return [encode(result) for result in results]

    def _written(self, result: Any, format: str) -> bytes | Media | Failure:
        """Return the bytes of a result, or why it cannot be sent.

        What has a media type of its own, and what becomes tensors together with others, is returned as it is.
        """
        alone, raw = not self._batchable, self._types[1].raw
        written, error = caught(lambda: write_result(result, format, self._body, is_alone=alone, is_raw=raw))
        if error is None:
            return written
        failure, error = self._unwritten(error), None  # see `_decoded`
        return failure

    def _body(self, result: Any, format: str) -> bytes | Media | Failure:
        """Return a result that is not an `Answer`, or the body of one, as `_written` does."""
        if type(result) is Media and format != TENSORS:
            why_not = self._no_media or ("" if format in FORMATS else "an array in JSON cannot hold one")
            if not why_not:
                return result
            return Failure(BadOutcome(f"a result of {self._class.__name__} is a forebay.Media, and {why_not}"))
        wrong, error = None, None
        if self._declared is not None:
            wrong, error = caught(self._declared.misfit, result)
        if wrong is not None:
            return Failure(BadOutcome(f"a result of {self._class.__name__} is not what it declares: {wrong}"))
        if error is None and format == TENSORS:
            return result
        if error is None:
            written, error = caught(self._encode[format], result)
            if error is None:
                return written
        failure, error = self._unwritten(error), None  # see `_decoded`
        return failure


class MethodsRunner(Runner):
    """Runs several methods of one model, which is loaded once; a batch is for one of them."""

    def __init__(self, predict: ModelRunner, others: Mapping[str, ModelRunner]) -> None:
        """Prepare `predict` for requests that name no method, and the other methods by their names."""
        self._predict = predict
        self._others = others
        self.borrows_input = all(runner.borrows_input for runner in (predict, *others.values()))
        self.shares_loop = all(runner.shares_loop for runner in (predict, *others.values()))

    def run_on_loop(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop that has loaded the model."""
        self._predict.run_on_loop(main)

    def open(self, ctx: WorkerContext) -> None:
        """Make the model and load it."""
        self._predict.open(ctx)
        self._share()

    def run(self, items: Sequence[Item]) -> Sequence[Outcome] | Iterator[Sequence[Any]] | JointStreams:
        """Run a batch; see `Runner.run`."""
        return self._asked(items).run(items)

    def close(self) -> None:
        """Drop the model."""
        self._let_go()
        self._predict.close()

    async def open_async(self, ctx: WorkerContext) -> None:
        """Make the model and load it on a loop that runs already."""
        await self._predict.open_async(ctx)
        self._share()

    async def close_async(self) -> None:
        """Drop the model on a loop that runs already."""
        self._let_go()
        await self._predict.close_async()

    def _let_go(self) -> None:
        for runner in self._others.values():
            runner.let_go()

    def run_async(self, items: Sequence[Item]) -> Any:
        """Run a batch on a loop; a method that is not a coroutine function needs no task there."""
        return self._asked(items).run_async(items)

    def _share(self) -> None:
        for runner in self._others.values():
            runner.share(self._predict)

    def _asked(self, items: Sequence[Item]) -> ModelRunner:
        name = items[0].params.get(CALL)
        return self._predict if name is None else self._others[name]


def _common_params(items: Sequence[Item]) -> Mapping[str, Any] | None:
    """Return the params of all items if they are the same object, as those of equal formats are."""
    first = items[0].params
    for item in items:
        if item.params is not first:
            return None
    return first
