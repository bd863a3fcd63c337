# SPDX-License-Identifier: Apache-2.0
"""What an owner tells fronts of a model, as plain data: enough to tell clients exactly what the owner tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError
from forebay.protocols.native import Contract
from forebay.protocols.openapi import Described, document
from forebay.server.served import Served, ServedMethod
from forebay.server.wire_schema import WireSchema, wire_schema_of
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.tensor_face import TensorFace
from forebay.types.first_use import known
from forebay.types.names import endpoint_name, version_name

MAX_PROBLEM: Final = 500
"""Longest text about why a model cannot answer."""


class DescribedCall(msgspec.Struct, frozen=True, kw_only=True):
    """What one method of a model takes and gives: how its bytes are moved, and how it is documented."""

    contract: Contract
    input: WireSchema
    output: WireSchema
    description: str
    query: dict[str, WireSchema]
    path: str
    call: str
    is_named: bool
    tensors: TensorFace | None

    def served(self, config: EndpointConfig, methods: Sequence[Described] = ()) -> ServedMethod:
        """Return it as protocols know it."""
        described = Described(
            name=config.name,
            version=config.version,
            description=self.description,
            input=self.input,
            output=self.output,
            streams=self.contract.streams,
            batchable=self.contract.batchable,
            query=self.query,
            is_named=self.is_named,
            path=self.path,
            verbs=self.contract.verbs,
            call=self.call,
            methods=methods,
        )
        return ServedMethod(self.contract, described, self.tensors)


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model.

    Attributes:
        config: Its name and its times.
        max_size: Samples in a batch.
        max_wait_s: See `BatchConfig`.
        capacity: Samples that may wait.
        idle: See `BatchConfig`.
        predict: What it answers at its own path.
        methods: What it answers at further paths.
        has_versions: See `Served`.
        any_version: See `Served`.
    """

    config: EndpointConfig
    max_size: int
    max_wait_s: float
    capacity: int
    idle: Literal["gather", "go", "wait"]
    predict: DescribedCall
    methods: tuple[DescribedCall, ...]
    has_versions: bool
    any_version: str | None

    @property
    def batching(self) -> BatchConfig:
        """How its owner batches."""
        return BatchConfig(max_size=self.max_size, max_wait_s=self.max_wait_s, capacity=self.capacity, idle=self.idle)

    @property
    def calls(self) -> tuple[DescribedCall, ...]:
        """All its methods."""
        return (self.predict, *self.methods)

    def reads_as(self, other: ModelDescription) -> bool:
        """Tell whether a request that was read for the one can be answered by the other."""
        ours, theirs = ([(one.contract, one.tensors) for one in each.calls] for each in (self, other))
        return ours == theirs and self.config.streams == other.config.streams

    def served_by(self, endpoint: Endpoint) -> Served:
        """Return the model with what answers for it."""
        methods = [one.served(self.config) for one in self.methods]
        face = self.predict.served(self.config, [one.described for one in methods])
        return Served(
            endpoint,
            face.contract,
            face.described,
            methods=methods,
            tensors=face.tensors,
            has_versions=self.has_versions,
            any_version=self.any_version,
            is_elsewhere=True,
        )


class WeighedModel(msgspec.Struct, frozen=True):
    """A version of a model, as it is told now.

    Attributes:
        model: What it is.
        weight: Its part of what is asked for without a version.
        problem: Why no worker could answer; empty if one could.
    """

    model: ModelDescription
    weight: int
    problem: str = ""


def description_of(served: Served) -> ModelDescription | None:
    """Describe what a server serves; None for what only the server itself can be asked, such as Nucleus' projects."""
    is_fed = any(contract.in_pieces for contract in served.contracts.values())
    if served.described is None or served.stand_in is not None or served.session is not None or is_fed:
        return None
    endpoint = served.endpoint
    batching = endpoint.batching
    return ModelDescription(
        config=endpoint.config,
        max_size=batching.max_size,
        max_wait_s=batching.max_wait_s,
        capacity=batching.capacity,
        idle=batching.idle,
        predict=_call(served.contract, served.described, served.tensors),
        methods=tuple(_call(one.contract, one.described, one.tensors) for one in served.methods),
        has_versions=served.has_versions,
        any_version=served.any_version,
    )


def _call(contract: Contract, described: Described, tensors: TensorFace | None) -> DescribedCall:
    return DescribedCall(
        contract=msgspec.structs.replace(contract, shares_disk=False),
        input=wire_schema_of(described.input),
        output=wire_schema_of(described.output),
        description=described.description,
        query={name: wire_schema_of(one) for name, one in described.query.items()},
        path=described.path,
        call=described.call,
        is_named=described.is_named,
        tensors=tensors,
    )


def read_description(given: Any) -> WeighedModel:
    """Read what an owner tells of a model; raises a `ConfigError` naming what is wrong with it."""
    try:
        weighed = msgspec.convert(given, known(WeighedModel))
        _check(weighed.model)
        predict = weighed.model.predict.served(weighed.model.config)
        msgspec.json.encode(document("check", "1", [predict.described]))
    except (msgspec.ValidationError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"its description of a model cannot be used: {error}") from error
    return weighed


def _check(model: ModelDescription) -> None:
    """Hold what an owner tells to what this server's own models are held to: names stand in paths and in metrics.

    Raises:
        ValueError: It cannot be served.
    """
    endpoint_name(model.config.name)
    version_name(model.config.version)
    if min(model.max_size, model.capacity) < 1 or not model.config.timeout_s > 0:
        raise ValueError("a model takes at least one sample, and some time")


def problem_of(endpoint: Endpoint) -> str:
    """Return why no worker of a model could answer; empty if one could."""
    told = endpoint.pool.statistics()
    return "" if told.can_answer else (told.problem or "no worker is attached")[:MAX_PROBLEM]
