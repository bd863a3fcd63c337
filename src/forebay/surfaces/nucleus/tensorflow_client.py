# SPDX-License-Identifier: Apache-2.0
"""The `tensorflow_client` of a handler: SavedModels by name and version, run here or by TensorFlow Serving.

Which models there are, and when one is loaded anew or leaves, is what it is for the models of Python handlers.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import ForebayError
from forebay.runtimes.library import RunOptions, accelerator
from forebay.runtimes.model_file import load_with
from forebay.runtimes.signature import Value
from forebay.surfaces.nucleus.handler_models import AGAIN_S, FIRST_S, LATEST, HandlerModels, ModelRules
from forebay.surfaces.nucleus.row_batches import Arrays, RowBatches, Run
from forebay.surfaces.nucleus.shim import UserException
from forebay.surfaces.nucleus.tensorflow_signatures import KeyedSignature, SignatureKeys, signature_of
from forebay.surfaces.nucleus.tensorflow_values import arrays_of, flat
from forebay.types.user_exceptions import answered

if TYPE_CHECKING:
    from forebay.repository.cache import Lease
    from forebay.runtimes.signature import Array
    from forebay.surfaces.nucleus.worker_requests import DeskClient

TIMEOUT_S: Final = 300.0
"""Time a prediction may take, as in the original."""


class TensorFlowRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration says of a TensorFlow project, beside its models.

    Attributes:
        keys: Which signatures it means.
        address: TensorFlow Serving, as `host:port`; empty where models run in the worker.
        is_on_gpu: Whether they run on a GPU there.
        max_batch_size: Rows that run together at most; None where calls run alone.
        batch_interval_s: How long they wait for others.
        threads: Calls that a worker has at a time.
    """

    keys: SignatureKeys = SignatureKeys()
    address: str = ""
    is_on_gpu: bool = False
    max_batch_size: int | None = None
    batch_interval_s: float = 0.0
    threads: int = 1


class _Model(msgspec.Struct, frozen=True, eq=False):
    """A version of a model that can be asked."""

    name: str
    version: str
    told: KeyedSignature
    run: Run


class TensorFlowModels(HandlerModels):
    """The models of a TensorFlow project, with its own words for those that are not there."""

    def __init__(self, rules: ModelRules, desk: DeskClient) -> None:
        super().__init__(rules, desk)
        self._invalid: dict[str, float] = {}
        desk.told["restored"] = self._restored

    def load_all(self) -> None:
        """Load what there is; what cannot be loaded is logged, and left out."""
        if not self._is_told.wait(FIRST_S):
            return
        for name, versions in [*self._models.items()]:
            for number, (version, key, size) in [*versions.items()]:
                lease = answered(partial(self._lease, name, number, version, key, size), lambda _: None)
                if lease is not None:
                    lease.release()
                else:
                    self._pass_over(key)

    def restore(self) -> None:
        """Have TensorFlow Serving load anew what it should have."""
        self._ask("restore")

    def _current(self, model_name: str | None, model_version: str | int | None) -> Lease[Any]:
        """Return the use of a version. Where all are loaded, the latest is the newest of those that can be."""
        if self._rules.cache_size is not None or not self._is_latest(model_version):
            return super()._current(model_name, model_version)
        models = self._models
        name = self._name(models, model_name, model_version)
        invalid, reason = self._invalid, None
        for version, key, _ in reversed(models[name].values()):
            if key in invalid and time.monotonic() < invalid[key]:
                continue
            try:
                return super()._current(name, version)
            except UserException as error:
                reason = reason or error
                self._pass_over(key)
        if reason is not None:
            raise reason
        return super()._current(name, LATEST)  # none can be loaded, and this one says why

    def _pass_over(self, key: str) -> None:
        """Note that a version cannot be loaded: for a while, it is not the latest."""
        self._invalid[key] = time.monotonic() + AGAIN_S

    def _no_model(self, name: str, version: str | int | None) -> Exception:
        if self._rules.kind == "paths" and name not in self._rules.names:
            return super()._no_model(name, version)
        if self._is_latest(version):
            return UserException(f"model '{name}' accessed with tag latest couldn't be found")
        return UserException(f"model '{name}' of version '{version}' couldn't be found")

    def _no_version(self, name: str, version: str) -> Exception:
        return UserException(f"model '{name}' of version '{version}' couldn't be found")

    def _restored(self, number: int) -> None:
        self._asked.pop(number).set_result("")


class TensorFlowClient:
    """Answers `predict`; the threads of a worker share it."""

    def __init__(self, models: TensorFlowModels, rules: TensorFlowRules) -> None:
        """Run what `models` has.

        Raises:
            ConfigError: If what asks TensorFlow Serving is not installed, or it has no such address.
        """
        self._models = models
        self._rules = rules
        self._calls: Any = None
        if rules.address:
            from forebay.remote_servers.servers import ServerAddress
            from forebay.remote_servers.tfserving import TfServingCalls

            self._calls = TfServingCalls(ServerAddress.parse(rules.address, "grpc", "tfs_container_dns"), TIMEOUT_S)
        models.bind(self._load)

    def predict(
        self, model_input: Any, model_name: str | None = None, model_version: str | int | None = LATEST
    ) -> dict[str, list[Any]]:
        """Run a model.

        Args:
            model_input: Its inputs by name: numbers, texts, lists in lists or NumPy arrays.
            model_name: Its name; not needed where there is one model only.
            model_version: Its version, or `latest`.

        Returns:
            Its outputs by name, as flat lists.

        Raises:
            UserException: If there is no such model or version, or it does not take that.
        """
        model: _Model = self._models.get_model(model_name, model_version)
        told = model.told
        arrays = arrays_of(told.signature, told.shapes, model_input, model.name, model.version)
        try:
            found = model.run(arrays)
        except (ForebayError, ValueError) as error:
            what = f"model '{model.name}' of version '{model.version}' cannot be run"
            raise UserException(what, error.message if isinstance(error, ForebayError) else str(error)) from error
        return {name: flat(array) for name, array in found.items()}

    def _load(self, folder: str) -> _Model:
        path = Path(folder)
        name, version = path.parent.name, path.name
        told = signature_of(path, self._rules.keys, name, version)
        run = self._here(path, told) if self._calls is None else self._remote(name, version, told)
        return _Model(name, version, told, self._batched(run))

    def _batched(self, run: Run) -> Run:
        """Return what runs a call, with others where the project says so."""
        rules = self._rules
        if rules.max_batch_size is None:
            return run
        interval_s, threads = rules.batch_interval_s, rules.threads
        return RowBatches(run, rules.max_batch_size, interval_s, threads=threads, timeout_s=TIMEOUT_S).run

    def _here(self, folder: Path, told: KeyedSignature) -> Run:
        device = accelerator("gpu") if self._rules.is_on_gpu else None
        file = load_with(folder, RunOptions(device=device, signature=told.key))
        signature = file.signature()

        def run(arrays: Arrays) -> dict[str, Array]:
            feed = [(var, Value(arrays[var.name])) for var in signature.feeds]
            found = file.run(feed, signature.fetches)
            return {var.name: value.array for var, value in zip(signature.fetches, found, strict=True)}

        return run

    def _remote(self, name: str, version: str, told: KeyedSignature) -> Run:
        def run(arrays: Arrays) -> dict[str, Array]:
            try:
                return self._calls.predict(name, int(version), told.key, arrays)
            except ForebayError as error:
                if getattr(error, "code_name", "") != "NOT_FOUND":
                    raise
            self._models.restore()  # it was started anew meanwhile
            return self._calls.predict(name, int(version), told.key, arrays)

        return run
