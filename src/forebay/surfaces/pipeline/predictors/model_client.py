# SPDX-License-Identifier: Apache-2.0
"""What an op asks for predictions: one interface to all kinds of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import (
    ConfigError,
    DeadlineExceeded,
    ForebayError,
    InvalidRequest,
    RunnerFailed,
    Unavailable,
    ValidationError,
)
from forebay.runtimes.signature import LOD, Feed, Signature, Var, named, one_feed
from forebay.surfaces.pipeline.codes import CustomExceptionCode, error, number_of
from forebay.types.did_you_mean import meant

if TYPE_CHECKING:
    from forebay.runtimes.model_file import Backend

_NUMBERS: Final = (
    (ValidationError, CustomExceptionCode.TYPE_ERROR),
    (InvalidRequest, CustomExceptionCode.INPUT_PARAMS_ERROR),
    (DeadlineExceeded, CustomExceptionCode.TIMEOUT),
    (Unavailable, CustomExceptionCode.CLIENT_ERROR),
    (RunnerFailed, CustomExceptionCode.CLIENT_ERROR),
)
"""What a pipeline calls the errors of models and of those who are asked for predictions."""


class Predictor(ABC):
    """What an op asks for predictions; the errors of every kind of model get a pipeline's numbers here.

    Attributes:
        is_shared: Whether any number of calls may use it at a time, each of which ends by itself: one that is late
            may be left alone with it.
        takes_text: Whether it takes texts beside arrays.
    """

    is_shared = False
    takes_text = False

    def predict(
        self,
        feed: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        fetch: Sequence[str] | None = None,
        batch: bool = True,
        log_id: int = 0,
    ) -> dict[str, Any]:
        """Ask the model.

        Args:
            feed: Arrays by the model's aliases; or a list of such, one a sample, which are put together.
            fetch: Aliases of the results that are wanted; none for what the op's settings say, else for all.
            batch: Whether the first axis of the arrays counts samples.
            log_id: Number of the request in logs, also those of a remote model.

        Returns:
            Arrays by the aliases of the results; beside one of sequences their offsets, by its alias and `.lod`.

        Raises:
            ForebayError: 5000 for other names than the model's, and for other shapes if these are known; 7000 for
                values that are not arrays of its types, 6000 if it does not answer in time, 9000 if it fails or nobody
                answers.
        """
        try:
            return self.ask(feed, fetch, batch, log_id)
        except ForebayError as problem:
            raise numbered(problem) from problem.__cause__

    @abstractmethod
    def ask(self, feed: Any, fetch: Sequence[str] | None, batch: bool, log_id: int) -> dict[str, Any]:
        """Ask the model; errors may have no number."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the model, or of the connections to it."""


def numbered(problem: ForebayError) -> ForebayError:
    """Return an error with its number; unchanged if it has a number, or is of a kind that needs none here."""
    if number_of(problem) is not None:
        return problem
    code = next((code for kind, code in _NUMBERS if isinstance(problem, kind)), None)
    return problem if code is None else error(code.value, problem.message, trace=problem.trace)


class ModelClient(Predictor):
    """Checks, casts and renames what goes to a backend and what comes from it."""

    def __init__(
        self, backend: Backend, signature: Signature | None, wanted: Sequence[str], *, is_shared: bool = False
    ) -> None:
        """Face a model.

        Args:
            signature: What it takes and gives; None asks the model at the first prediction.
            wanted: Aliases of the results for a call that names none; if empty, all.

        Raises:
            ConfigError: If one is none of the model's, as far as they are known.
        """
        if signature is not None:
            require_wanted(wanted, signature)
        self.is_shared = is_shared
        self._backend = backend
        self._signature = signature
        self._wanted = wanted

    @property
    def feed_names_(self) -> list[str] | None:
        """Aliases of what the model takes; None while they are not known."""
        return None if self._signature is None else [var.alias for var in self._signature.feeds]

    @property
    def fetch_names_(self) -> list[str] | None:
        """Aliases of what the model gives; None while they are not known."""
        return None if self._signature is None else [var.alias for var in self._signature.fetches]

    def ask(self, feed: Any, fetch: Sequence[str] | None, batch: bool, log_id: int) -> dict[str, Any]:
        """Ask the model."""
        given, is_batch = one_feed(feed, batch=batch)
        wanted = fetch or self._wanted
        if self._signature is None:
            self._signature = self._backend.signature()
        signature = self._signature or _as_it_comes(given, wanted)
        fed = signature.fed(given, batch=is_batch)
        if not signature.fetches:
            return self._all_of(fed, log_id)
        fetches = signature.fetched(wanted)
        return named(fetches, self._backend.run(fed, fetches, log_id))

    def _all_of(self, fed: Feed, log_id: int) -> dict[str, Any]:
        """Ask a model for all of its results, of which nothing is known."""
        text = "nothing says what the model gives; name the results in fetch_list, or describe it in client_config"
        raise InvalidRequest(text)

    def different(self, other: ModelClient) -> str | None:
        """Return what another model of this kind would take or give differently from this one; None if nothing."""
        ours, theirs = self._described(), other._described()
        return ours[0].different(theirs[0]) or ours[1].different(theirs[1])

    def close(self) -> None:
        """Let go of the model."""
        self._backend.close()

    def _described(self) -> tuple[Signature, Signature]:
        """Return what a description says of the model and what it says of itself, both with the same aliases."""
        own = self._backend.signature() or Signature((), ())
        described = self._signature or own
        return described, described.as_in(own)


def require_wanted(wanted: Sequence[str], signature: Signature) -> None:
    """Check that a model gives the results that are wanted; raises ConfigError if it does not."""
    known = [var.alias for var in signature.fetches]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"fetch_list names '{name}', the model gives {', '.join(known)}{meant(name, known)}")


def _as_it_comes(feed: Mapping[str, Any], wanted: Sequence[str]) -> Signature:
    """Return a signature for a model without a description: it takes whatever it is given."""
    return Signature(
        tuple(Var(name, name) for name in feed if not (name.endswith(LOD) and name.removesuffix(LOD) in feed)),
        tuple(Var(name, name) for name in wanted),
    )
