# SPDX-License-Identifier: Apache-2.0
"""A model that is a Python callable: it is given arrays by name and returns arrays by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from forebay.errors import ConfigError, InvalidRequest, RunnerFailed
from forebay.runtimes.signature import LOD, one_feed
from forebay.surfaces.pipeline.predictors.model_client import Predictor
from forebay.types.failures import trace_of, words_of
from forebay.workers.user_calls.user_code import caught, close, user_code


class FunctionClient(Predictor):
    """Calls the function, which decides itself what it takes and gives, so names are checked only on the way back."""

    takes_text = True

    def __init__(self, reference: str, wanted: Sequence[str]) -> None:
        """Import it; a class is called without arguments, and what it makes is the model.

        Args:
            wanted: Names of the results for a call that names none; if empty, all.

        Raises:
            ConfigError: If there is none of this name.
        """
        module, _, name = reference.partition(":")
        found, problem = caught(_named, module, name)
        if isinstance(problem, ImportError | AttributeError):
            why = words_of(problem)
            msg = f"model_config: expected module:callable, got '{reference}', which cannot be imported: {why}"
            raise ConfigError(msg) from problem
        with user_code():
            if problem is not None:
                raise problem
            made: Any = found() if isinstance(found, type) else found
        if not callable(made):
            msg = f"model_config is '{reference}', and that cannot be called; a function or a class with __call__ can"
            raise ConfigError(msg)
        self._call = cast("Callable[[dict[str, Any]], Any]", made)
        self._reference = reference
        self._wanted = wanted

    def ask(self, feed: Any, fetch: Sequence[str] | None, batch: bool, log_id: int) -> dict[str, Any]:
        """Call it with a dict of its own."""
        import numpy as np

        fed, is_batch = one_feed(feed, batch=batch)
        given = dict(fed)
        if not is_batch:
            for name, value in given.items():
                if isinstance(value, np.ndarray) and not name.endswith(LOD):
                    given[name] = cast("Any", value)[np.newaxis]
        found, problem = caught(self._call, given)
        if problem is not None:
            text = f"the model '{self._reference}' failed: {words_of(problem)}"
            raise RunnerFailed(text, trace=trace_of(problem)) from problem
        if not isinstance(found, Mapping):
            close(found)  # nobody runs a coroutine or a generator here
            text = f"the model '{self._reference}' returned {type(found).__name__}; expected a dict of arrays"
            raise RunnerFailed(text)
        answer = cast("Mapping[str, Any]", found)
        wanted = fetch or self._wanted
        missing = [name for name in wanted if name not in answer]
        if missing:
            text = f"the model '{self._reference}' gave {', '.join(answer)}, and not {', '.join(missing)}"
            raise InvalidRequest(text)
        return {name: answer[name] for name in wanted} if wanted else dict(answer)

    def close(self) -> None:
        """Nothing is to be let go of."""


def _named(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
