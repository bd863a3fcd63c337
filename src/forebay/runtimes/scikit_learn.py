# SPDX-License-Identifier: Apache-2.0
"""Models of scikit-learn: files of skops, and pickles where the operator trusts them.

The file declares no types, so they are derived from the fitted model. A model that was fitted on a DataFrame has an
input for each column; any other has `x`, all features of a sample. Encoders and vectorizers tell which of them are
texts. One sample is predicted when the model is loaded, for the types and shapes of the outputs.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from io import BytesIO
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.arrays.numpy_tensors import texts_or_bytes
from forebay.errors import ConfigError
from forebay.runtimes.library import RunOptions, Runtime, Trust, library, ordinary, runs_on_cpu
from forebay.runtimes.signature import Signature, Value, Var
from forebay.types.datatypes import BY_NUMPY

if TYPE_CHECKING:
    from forebay.runtimes.signature import Array

_EXTRA: Final = "forebay[sklearn]"
_ONE_INPUT: Final = "x"
_MAX_TYPES: Final = 20
"""Untrusted types that a refusal names."""


class ScikitLearn(Runtime):
    """A fitted estimator or pipeline, computed on the CPU; its outputs are called like its methods.

    The trial alone shows what depends on neighbours.
    """

    is_shared = False

    def __init__(self, model: Path, options: RunOptions) -> None:
        """Load the file and predict one sample."""
        import numpy as np

        self._np = np
        self._file = model.name
        self._model: Any = (_read_skops if model.suffix == ".skops" else _read_pickle)(model, options.trust)
        if options.device is not None:
            runs_on_cpu(model, "scikit-learn", options.device)
        methods = _methods(self._model, self._file)
        self._columns = [str(name) for name in getattr(self._model, "feature_names_in_", ())]
        feeds = self._features() if self._columns else (self._single(),)
        self.signature = Signature(feeds, self._outputs(methods, {var.name: self._made(var) for var in feeds}))

    def run(self, feed: Mapping[str, Value], fetch: Sequence[str]) -> Sequence[Value]:
        """Call the methods of these names."""
        table = self._table({name: ordinary(name, value) for name, value in feed.items()})
        return [Value(self._called(name, table)) for name in fetch]

    def _features(self) -> tuple[Var, ...]:
        """Return an input for each column of the DataFrame."""
        self._pandas = library("pandas", f"{self._file} was fitted on a DataFrame of pandas", _EXTRA)
        known = _examples(self._model, self._columns)
        return tuple(_input(name, known.get(name, ())) for name in self._columns)

    def _single(self) -> Var:
        """Return the input of a model that was fitted on an array or on texts.

        Raises:
            ConfigError: If the model does not tell its features, or they are of several types.
        """
        features = getattr(self._model, "n_features_in_", None)
        if features is None:
            if texts := _examples(self._model, [_ONE_INPUT]).get(_ONE_INPUT):
                return _input(_ONE_INPUT, texts)
            raise ConfigError(
                f"{self._file} does not say how many features it takes (n_features_in_); expected a fitted model"
            )
        known = _examples(self._model, range(features))
        if any(isinstance(one, str) for examples in known.values() for one in examples):
            raise ConfigError(
                f"{self._file} takes an array with texts; fit it on a DataFrame, whose columns have types"
            )
        return _input(_ONE_INPUT, (), (features,))

    def _made(self, var: Var) -> Array:
        value = var.examples[0] if var.examples else 0.0
        return self._np.full((1, *var.shape), value, object if isinstance(value, str) else var.dtype)

    def _outputs(self, methods: Sequence[str], sample: Mapping[str, Array]) -> tuple[Var, ...]:
        """Return the outputs of these methods for one sample; one that gives several arrays is left out."""
        table = self._table(sample)
        found: list[Var] = []
        for name in methods:
            value = getattr(self._model, name)(table)
            if not isinstance(value, list):  # the chances of several outputs, an array for each
                found.append(_output(name, self._np.asarray(value)))
        return tuple(found)

    def _table(self, arrays: Mapping[str, Array]) -> Any:
        """Return what the model was fitted on: a DataFrame, a matrix or a vector of texts."""
        made = {name: texts_or_bytes(one) if one.dtype.hasobject else one for name, one in arrays.items()}
        if not self._columns:
            return made[_ONE_INPUT]
        return self._pandas.DataFrame(made, columns=self._columns)

    def _called(self, method: str, table: Any) -> Array:
        found = self._np.asarray(getattr(self._model, method)(table))
        return found.astype(object) if found.dtype.kind == "U" else found


def _read_skops(model: Path, trust: Trust) -> Any:
    """Read a file of skops.

    Raises:
        ConfigError: If skops is missing, or the file has types that are not trusted.
    """
    skops = library("skops.io", f"{model.name} is read by skops", _EXTRA)
    data = model.read_bytes()
    untrusted: list[str] = sorted(set(skops.get_untrusted_types(file=BytesIO(data))) - set(trust.types))
    if untrusted:
        more = len(untrusted) - _MAX_TYPES
        names = ", ".join(map(repr, untrusted[:_MAX_TYPES])) + (f" and {more} more" if more > 0 else "")
        allowed = "TYPE,..." if more > 0 else shlex.quote(",".join((*trust.types, *untrusted)))
        raise ConfigError(
            f"{model.name} has types that skops does not trust: {names}; "
            f"if you trust the author of the file, allow them: --trust-types {allowed}"
        )
    return skops.loads(data, trusted=list(trust.types))


def _read_pickle(model: Path, trust: Trust) -> Any:
    """Read a pickle, also one of joblib.

    Raises:
        ConfigError: If pickles are not trusted, or joblib is missing.
    """
    if not trust.pickle:
        raise ConfigError(
            f"{model.name} is a pickle, which can run any code as soon as it is loaded; save the model with "
            "skops.io.dump(model, 'model.skops'), or allow it with --trust-pickle if you trust the author of the file"
        )
    joblib = library("joblib", f"{model.name} is read by joblib", _EXTRA)
    return joblib.load(BytesIO(model.read_bytes()))


def _methods(model: Any, file: str) -> list[str]:
    """Return the methods that are served; raises a `ConfigError` if the model has none."""
    first = next((name for name in ("predict", "transform") if hasattr(model, name)), None)
    if first is None:
        raise ConfigError(
            f"{file} holds a {type(model).__name__}, which has neither predict nor transform; "
            "expected a fitted estimator or pipeline of scikit-learn"
        )
    return [first, *(["predict_proba"] if hasattr(model, "predict_proba") else [])]


def _input(name: str, examples: tuple[str | float, ...], shape: tuple[int, ...] = ()) -> Var:
    datatype = "BYTES" if any(isinstance(one, str) for one in examples) else "FP64"
    return Var(name, name, datatype, shape, rows=-1, examples=examples)


def _output(name: str, value: Array) -> Var:
    is_text = value.dtype.kind == "U" or (value.dtype.hasobject and all(isinstance(one, str) for one in value.flat))
    known = None if is_text else BY_NUMPY.get(value.dtype.name)
    datatype = "BYTES" if is_text and value.ndim else known and known.name
    return Var(name, name, datatype, value.shape[1:], rows=-1, type=value.dtype.name)


def _examples(step: Any, columns: Sequence[Any]) -> dict[Any, tuple[str | float, ...]]:
    """Return values of each column of which an encoder or a vectorizer in the model tells some."""
    if hasattr(step, "build_analyzer"):  # of texts
        return dict.fromkeys(columns, ("a", "b c"))
    if hasattr(step, "transformers_"):
        parts = [_examples(inner, _selected(columns, of)) for _, inner, of in step.transformers_]
        return {name: values for part in parts for name, values in part.items()}
    if hasattr(step, "steps"):
        found = (_examples(inner, columns) for _, inner in step.steps)
        return next((known for known in found if known), dict[Any, tuple[str | float, ...]]())
    categories: Sequence[Any] = getattr(step, "categories_", ())
    if len(categories) != len(columns):
        return {}
    return {name: _first_and_last(each) for name, each in zip(columns, categories, strict=True)}


def _selected(columns: Sequence[Any], of: Any) -> list[Any]:
    """Return the columns that a part of a `ColumnTransformer` takes: by name, by place, by a slice or by a mask."""
    import numpy as np

    names: list[Any] = np.ravel(np.asarray(of, object)).tolist()
    if any(isinstance(name, str) for name in names):
        return names
    found: Any = np.asarray(columns, object)[of if len(names) else []]
    return np.ravel(found).tolist()


def _first_and_last(categories: Sequence[Any]) -> tuple[str | float, ...]:
    texts = [one for one in categories if isinstance(one, str)]
    found = texts or [float(one) for one in categories if isinstance(one, Real) and math.isfinite(one)]
    return (found[0], found[-1]) if found else ()
