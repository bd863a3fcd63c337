# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=false
"""Parts of a step that are written at once are those that are written one by one, right ones and wrong ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay
from forebay.errors import NotFound
from forebay.serving.models.model_runner import runner_for
from forebay.types.call import Failure, Request
from forebay.workers.runner import WorkerContext

JSON, PACK = {"in": "json", "out": "json"}, {"in": "json", "out": "msgpack"}
PARTS: dict[str, Any] = {
    "number": 1,
    "truth": True,
    "fraction": 0.5,
    "not a number": math.nan,
    "text": "é",
    "half a pair": "\ud800",
    "list": [1, "a"],
    "numpy": np.int64(3),
    "array": np.arange(3),
    "set": {1},
    "object": object(),
    "bytes": b"\xff",
    "error": ValueError("as a part"),
    "failure": Failure(NotFound("nobody")),
    "media": forebay.Media(b"picture", "image/png"),
    "nothing": None,
}


class Untyped(forebay.Model):
    def predict(self, batch: list[list[str]]):
        for step in zip(*batch, strict=True):
            yield [PARTS[name] for name in step]


class Typed(Untyped):
    def predict(self, batch: list[list[str]]) -> Iterator[list[int | str]]:
        yield from super().predict(batch)


class Unchecked(Typed):
    check_outputs = False


class Finished(Untyped):
    def postprocess(self, result: Any) -> Any:
        return [result]


def told(part: Any) -> Any:
    """A part as it can be compared."""
    if type(part) is Failure:
        return type(part.error), part.error.message
    return (part.body, part.type) if isinstance(part, forebay.Media) else part


def streams(model: type[forebay.Model], samples: list[list[str]], params: list[dict[str, str]]) -> list[list[Any]]:
    """What each of these requests is sent in one batch, until it ends."""
    runner = runner_for(model)
    runner.open(WorkerContext())
    try:
        items = [
            Request(body=str(sample).replace("'", '"').encode(), reply=print, params=each)
            for sample, each in zip(samples, params, strict=True)
        ]
        found: list[list[Any]] = [[] for _ in items]
        made: Any = runner.run(items)
        for step in made:
            for place, part in enumerate(step):
                found[place].append(told(part))
        return found
    finally:
        runner.close()


@given(
    st.sampled_from([Untyped, Typed, Unchecked, Finished]),
    st.integers(1, 4).flatmap(
        lambda steps: st.lists(
            st.lists(st.sampled_from(["number"] * 8 + ["text"] * 4 + list(PARTS)), min_size=steps, max_size=steps),
            min_size=2,
            max_size=4,
        )
    ),
    st.lists(st.sampled_from([JSON, JSON, JSON, PACK]), min_size=4, max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_parts_of_a_batch_are_those_of_each_request_alone(model, samples, params):
    params = params[: len(samples)]
    alone = [streams(model, [sample], [each])[0] for sample, each in zip(samples, params, strict=True)]
    assert streams(model, samples, params) == alone
