# SPDX-License-Identifier: Apache-2.0
"""What a process does that was started for a model: it loads the model and makes one prediction at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.errors import ForebayError, RunnerFailed
from forebay.surfaces.pipeline import logs
from forebay.surfaces.pipeline.codes import err_of
from forebay.surfaces.pipeline.predictors.client_watching import watch_of, watched_client
from forebay.surfaces.pipeline.predictors.model_client import Predictor, numbered
from forebay.surfaces.pipeline.predictors.model_settings import LocalConf
from forebay.types.first_use import known
from forebay.workers.runner import Runner, WorkerContext
from forebay.workers.user_calls.user_code import attempt

if TYPE_CHECKING:
    from forebay.types.call import Item, Outcome


class PredictionRunner(Runner):
    """Runs predictions of one model; a `Runner`."""

    def __init__(self, conf: Mapping[str, Any], indices: Sequence[int]) -> None:
        """Describe the model; the arguments are those of the factory.

        Args:
            conf: The fields of its `LocalConf`.
            indices: Which of its devices each process takes; see `LocalConf.device_of`.
        """
        self._conf = msgspec.convert(conf, known(LocalConf))
        self._indices = indices
        self._model: Predictor | None = None

    def open(self, ctx: WorkerContext) -> None:
        """Load the model."""
        logs.to_stderr("info")
        watch = watch_of("a model's process", self._conf)
        self._model = watched_client(self._conf, (), self._indices[ctx.index], watch)

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Make predictions."""
        return [attempt(self._predict, item) for item in items]

    def close(self) -> None:
        """Let go of the model."""
        if self._model is not None:
            self._model.close()

    def _predict(self, item: Item) -> Mapping[str, Any]:
        import numpy as np

        assert self._model is not None
        try:
            found = self._model.predict(item.body["feed"], item.body["fetch"], log_id=item.params["log_id"])
        except ForebayError as problem:
            told = err_of(numbered(problem))
            text = f"the process of the model answers {told.err_no}: {told.text}"
            raise RunnerFailed(text, trace=problem.trace) from problem
        return {name: np.asarray(value) for name, value in found.items()}
