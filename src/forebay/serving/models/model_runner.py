# SPDX-License-Identifier: Apache-2.0
"""Runs a `Model` in a worker: decode each sample, predict the batch, encode each result.

Samples are decoded and results encoded here, next to the model, so that the event loop moves bytes only. One list
comprehension each way is the common case; only a batch in which something fails is looked at sample by sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import BadOutcome
from forebay.serving.models.batch_runner import BatchRunner, Samples
from forebay.serving.models.model import load_module, models_in, settings_of
from forebay.serving.models.reading import refusal
from forebay.serving.models.schema import io_types
from forebay.types.call import Failure
from forebay.workers.pool import failure_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from forebay.serving.models.model import Model
    from forebay.types.call import Item, Outcome


def from_file(path: str, name: str, *, isolate_errors: bool = False) -> ModelRunner:
    """Build the runner of a model class in a file; the reference that worker processes are given."""
    return ModelRunner(models_in(load_module(Path(path)), name)[0], isolate_errors=isolate_errors)


class ModelRunner(BatchRunner):
    """A `Runner` for one model class. Bodies and results are bytes in the formats that `params` names."""

    def __init__(self, model_class: type[Model], *, isolate_errors: bool = False) -> None:
        """Read the class; `open` makes the model.

        Args:
            model_class: What runs.
            isolate_errors: Halve batches that fail as a whole, also if the class does not ask for it.
        """
        super().__init__(model_class, settings_of(model_class), isolate_errors=isolate_errors)
        given, answer = io_types(model_class)
        self._decode = {name: given.decoder(name) for name in ("json", "msgpack")}
        self._encode = {name: answer.encoder(name) for name in ("json", "msgpack")}
        self._batchable = self._settings.batchable
        self.borrows_input = model_class.borrows_input or not given.refers

    def _decoded(self, items: Sequence[Item]) -> Samples:
        if not self._batchable:
            try:
                params = _common_params(items)
                if params is not None:
                    decode = self._decode[params["in"]]
                    return Samples(items, [decode(item.body) for item in items], None, {})
                return Samples(items, [self._decode[item.params["in"]](item.body) for item in items], None, {})
            except Exception:  # noqa: BLE001, S110 - which one it was is found below
                pass
        samples: list[Any] = []
        owners: list[int] = []
        failures: dict[int, Failure] = {}
        for owner, item in enumerate(items):
            rows = item.body if self._batchable else (item.body,)
            decode = self._decode[item.params["in"]]
            found: list[Any] = []
            for number, row in enumerate(rows):
                try:
                    found.append(decode(row))
                except Exception as error:  # noqa: BLE001 - msgspec, pydantic or a hook of the user's
                    failures[owner] = Failure(refusal(error, row, number if self._batchable else None))
                    break
            else:
                samples += found
                owners += [owner] * len(found)
        return Samples(items, samples, owners, failures)

    def _encoded(self, batch: Samples) -> Sequence[Outcome]:
        items = batch.items
        if not batch.failures and not self._batchable:
            try:
                params = _common_params(items)
                if params is not None:
                    encode = self._encode[params["out"]]
                    return [encode(result) for result in batch.samples]
            except Exception:  # noqa: BLE001, S110 - which one it was is found below
                pass
        outcomes: list[Any] = [[] for _ in items]
        for owner, result in zip(batch.owners, batch.samples, strict=True):
            if owner in batch.failures:
                continue
            try:
                outcomes[owner].append(self._encode[items[owner].params["out"]](result))
            except Exception as error:  # noqa: BLE001 - the result holds something that cannot be sent
                batch.failures[owner] = failure_of(_unsendable(error, self._class))
        for owner, failure in batch.failures.items():
            outcomes[owner] = failure
        if self._batchable:
            return outcomes
        return [outcome if type(outcome) is Failure else outcome[0] for outcome in outcomes]

    def _parts(self, batch: Samples, given: list[Any]) -> Sequence[Any]:
        """Encode the parts of one step; one that cannot be encoded fails its own sample."""
        encode = self._encode["json"]
        parts: list[Any] = [None] * len(batch.items)
        for owner, part in zip(batch.owners, given, strict=True):
            if part is None or type(part) is Failure:
                parts[owner] = part
                continue
            try:
                parts[owner] = encode(part)
            except Exception as error:  # noqa: BLE001 - the part holds something that cannot be sent
                parts[owner] = failure_of(_unsendable(error, self._class))
        return parts


def _common_params(items: Sequence[Item]) -> Mapping[str, Any] | None:
    """Return the params of all items if they are the same object, as those of equal formats are."""
    first = items[0].params
    for item in items:
        if item.params is not first:
            return None
    return first


def _unsendable(error: Exception, model: type) -> BadOutcome:
    return BadOutcome(f"a result of {model.__name__} cannot be encoded: {error}")
