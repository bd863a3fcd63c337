# SPDX-License-Identifier: Apache-2.0
"""Runs a node in a worker: its inputs are Python values, and so are its results; nothing is decoded or encoded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from forebay.errors import BadOutcome
from forebay.graph.spec import OUT
from forebay.graph.values import Outputs, inputs_of
from forebay.serving.models.batch_runner import BatchRunner, Samples
from forebay.serving.models.model import Model, settings_of
from forebay.serving.models.model_runner import ModelRunner
from forebay.serving.models.outputs import Held
from forebay.types.call import Failure, Item, Outcome
from forebay.types.failures import failure_of
from forebay.workers.runner import Runner
from forebay.workers.user_calls.user_code import attempt


def model_of(function: Callable[..., Any], *, batched: bool) -> type[Model]:
    """Return a function as a model that has nothing to load.

    Args:
        batched: Whether it takes lists, one for each input. If not, it is called for one sample at a time, with the
            inputs as keyword arguments; the samples it is given are then dicts.
    """
    members: dict[str, Any] = {"__doc__": function.__doc__, "__module__": function.__module__}
    if batched:
        members["predict"] = staticmethod(function)
    else:
        members["preprocess"] = staticmethod(_by_name(function))
        members["predict"] = staticmethod(_as_they_are)
        # One at a time, or the first of a batch would wait for the last: there is nothing to share in one call each.
        members["max_batch_size"] = 1
    return type(getattr(function, "__name__", "function"), (Model,), members)


class NodeRunner(BatchRunner):
    """A `Runner` for a node. Bodies are dicts of inputs, or lists of such dicts; results are whatever comes."""

    def __init__(
        self, model: type[Model], ports: Sequence[str] | None, results: Results, *, isolate_errors: bool = False
    ) -> None:
        """Read the class; `open` makes the model.

        Args:
            ports: The inputs in the order of predict's parameters: one, whose values are the samples, or several, for
                each of which predict is given a list. None: a sample is the dict of all inputs.
            results: What becomes of what the model returns.
            isolate_errors: Halve batches that fail as a whole, also if the class does not ask for it.
        """
        super().__init__(model, settings_of(model, one_input=False), isolate_errors=isolate_errors)
        self._ports = ports
        self._results = results

    def _loaded(self) -> None:
        super()._loaded()
        if self._ports is not None and len(self._ports) > 1:
            predict = self._predict

            def each_input(samples: list[Any]) -> Any:
                return predict(*map(list, zip(*samples, strict=True)))

            self._predict = each_input

    def _decoded(self, items: Sequence[Item]) -> Samples:
        return _samples(items, self._sample)

    def _sample(self, inputs: Mapping[str, Any]) -> Any:
        ports = self._ports
        if ports is None:
            return inputs
        if len(ports) == 1:
            return inputs.get(ports[0])
        return tuple(map(inputs.get, ports))

    def _encoded(self, batch: Samples) -> Sequence[Outcome]:
        outcomes: list[Any] = [[] for _ in batch.items]
        are_right = self._results.all_fit(batch.samples)
        for owner, result in zip(batch.owners, batch.samples, strict=True):
            try:
                outcomes[owner].append(
                    self._outcome(result, is_spread=_is_spread(batch.items[owner]), is_right=are_right)
                )
            except BadOutcome as error:
                batch.failures[owner] = failure_of(error)
        for owner, item in enumerate(batch.items):
            if owner in batch.failures:
                outcomes[owner] = batch.failures[owner]
            elif not _is_spread(item):
                outcomes[owner] = outcomes[owner][0]
        return outcomes

    def write(self, part: Any, params: Mapping[str, Any]) -> Any:
        """Return a part of a stream after a look at its type."""
        return attempt(self._results.outcome, part)

    def _parts(self, batch: Samples, given: list[Any]) -> Sequence[Any]:
        # Only a node that is called outside of a server comes here, and runs for one sample.
        return [None if part is None or type(part) is Failure else self.write(part, {}) for part in given]

    def _outcome(self, result: Any, *, is_spread: bool, is_right: bool) -> Outcome:
        outcome = self._results.outcome(result, is_right=is_right)
        if is_spread and type(outcome) is Outputs:
            raise BadOutcome(f"{self._class.__name__} is mapped over a list and skipped an element; return None for it")
        return outcome


class StreamedNodeRunner(ModelRunner):
    """A `Runner` for a node that streams: bodies are dicts of inputs, parts leave as clients want them."""

    def __init__(self, model: type[Model], port: str) -> None:
        """Read the class; `open` makes the model, whose samples are the values of the input `port`."""
        super().__init__(model)
        self._port = port
        self.borrows_input = True  # values are loaded into memory of their own

    def _decoded(self, items: Sequence[Item]) -> Samples:
        return _samples(items, lambda inputs: inputs.get(self._port))


class Results:
    """What a graph makes of what a function returned."""

    def __init__(self, where: str, outputs: Sequence[str], types: Mapping[str, Any]) -> None:
        """Read the types.

        Args:
            where: The node, as messages name it.
            outputs: The names of its results if they are several.
            types: What each result is held to, by name.
        """
        self._where = where
        self._outputs = outputs
        self._held = {name: Held(annotation) for name, annotation in types.items() if annotation is not Any}

    def all_fit(self, results: Sequence[Any]) -> bool:
        """Tell whether all results of a batch are certainly right; much cheaper than checking one by one."""
        held = None if self._outputs else self._held.get(OUT)
        return not self._held if held is None else held.fits(list(results))

    def outcome(self, result: Any, *, is_right: bool = False) -> Outcome:
        """Return what goes on.

        Args:
            is_right: Whether its type need not be looked at.

        Raises:
            BadOutcome: If it is not of its declared type, or there are several and it is not a mapping of them.
        """
        outcome = self._named(result)
        if not is_right:
            values = outcome.by_port if isinstance(outcome, Outputs) else {OUT: outcome}
            for name, held in self._held.items():
                wrong = held.misfit(values[name]) if name in values else None
                if wrong is not None:
                    what = f"a result of {self._where}" if name == OUT else f"'{name}' of {self._where}"
                    raise BadOutcome(f"{what} is not what it declares: {wrong}")
        return outcome

    def _named(self, result: Any) -> Outcome:
        outputs = self._outputs
        if not outputs or isinstance(result, Outputs):
            return result
        if isinstance(result, Mapping):
            values = cast("Mapping[str, Any]", result)
            if values.keys() <= set(outputs):
                return Outputs(values)
        found = list(cast("Mapping[Any, Any]", result)) if isinstance(result, Mapping) else type(result).__name__
        raise BadOutcome(f"{self._where} returned {found}; expected a mapping with outputs of {list(outputs)}")


class FirstRunner(Runner):
    """Returns the first input that came, as it is: packed values stay packed."""

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Run a batch; the inputs stand in the order of their ports."""
        return [next(iter(item.body.values())) for item in items]


def _samples(items: Sequence[Item], sample: Callable[[Mapping[str, Any]], Any]) -> Samples:
    samples: list[Any] = []
    owners: list[int] = []
    failures: dict[int, Failure] = {}
    for owner, item in enumerate(items):
        inputs = attempt(inputs_of, item)
        if type(inputs) is Failure:
            failures[owner] = inputs
            continue
        rows = cast("list[Mapping[str, Any]]", inputs) if isinstance(inputs, list) else [inputs]
        samples += map(sample, rows)
        owners += [owner] * len(rows)
    return Samples(items, samples, owners, failures)


def _is_spread(item: Item) -> bool:
    return isinstance(item.body, list)


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def _by_name(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    if inspect.iscoroutinefunction(function):

        async def call_async(inputs: Mapping[str, Any]) -> Any:
            return await function(**inputs)

        return call_async

    def call(inputs: Mapping[str, Any]) -> Any:
        return function(**inputs)

    # Its kind is that of the function, its parameters are not.
    vars(call).update(__wrapped__=function, __signature__=inspect.signature(call))
    return call
