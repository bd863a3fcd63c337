# SPDX-License-Identifier: Apache-2.0
"""What a serving consists of, and the options under which it is started."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, cast

import msgspec

from forebay.arrays.libraries import find_kind
from forebay.errors import ConfigError
from forebay.types.first_use import known
from forebay.types.settings import Checked, Count, Milliseconds, checked
from forebay.types.tenant import ALL, TenantConfig, Tenants, name_of_tenant


def _keys(value: Any) -> tuple[Hashable, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("expected a list with at least one batch key")
    keys = tuple(cast("Sequence[Hashable]", value))
    for key in keys:
        try:
            hash(key)
        except TypeError:
            raise ValueError(f"expected hashable batch keys such as names, got {key!r}") from None
    if len(set(keys)) < len(keys):
        raise ValueError("expected each batch key once")
    return keys


def _partitions(value: Any) -> bool | int | tuple[Any, ...]:
    if type(value) is bool or (type(value) is int and value >= 1):
        return value
    if type(value) in {list, tuple} and value:
        return tuple(cast("Sequence[Any]", value))
    raise ValueError("expected True (one for each device), a number >= 1 or a list of devices")


def _tenants(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        raise ValueError("expected tenants by name, such as {'team-a': {'weight': 3, 'class': 1}}, or None")
    for name, given in cast("Mapping[Any, Any]", value).items():
        if name != ALL:
            name_of_tenant(name if isinstance(name, str) else "")
        _tenant(name, given)
    return cast("Any", value)


def _tenant(name: str, given: Any) -> TenantConfig:
    if not isinstance(given, Mapping) or (found := cast("Mapping[Any, Any]", given)).keys() - {"weight", "class"}:
        raise ValueError(f"expected weight and class for '{name}', such as {{'weight': 3, 'class': 1}}")
    told = {"tier" if key == "class" else key: one for key, one in found.items()}
    try:
        return msgspec.convert(told, known(TenantConfig))
    except msgspec.ValidationError:
        raise ValueError(f"expected a weight from 0.001 to 1000 and a class from 0 to 3 for '{name}'") from None


class ProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a started serving runs.

    Attributes:
        batch_keys: The batch keys that are taken.
        batch_size: Rows of a batch at most.
        batch_timeout_ms: Time from the first row of a batch until it leaves although it is not full.
        partitions: How many batches may run at a time: False is one, True asks the compiler (one for each device), a
            number is that many, a list is one for each of these devices.
        distribution_weight: Share of the calls that this process gets where several run under one name.
        shutdown_ms: Time that running batches have to end when it is stopped.
        max_queue_rows: Rows that may wait; a call beyond that is refused at once. None is 64 times the batch size.
        pad_to_batch_size: Whether every batch is padded with zeros to the batch size; callers never see the padding.
        worker_kind: Where partitions live: threads of this program, or operating system processes of their own.
        tenants: Who shares the partitions, by name: `{"team-a": {"weight": 3, "class": 1}}`; "*" stands for all others.
            None where calls name no tenant.
    """

    batch_keys: Annotated[Sequence[Any], Checked(_keys)] = ("default",)
    batch_size: Count = 1
    batch_timeout_ms: Milliseconds = 100
    partitions: Annotated[bool | int | Sequence[Any], Checked(_partitions)] = False
    distribution_weight: Count = 1
    shutdown_ms: Milliseconds = 30_000
    max_queue_rows: Count | None = None
    pad_to_batch_size: bool = False
    worker_kind: Literal["thread", "process"] = "thread"
    tenants: Annotated[Any, Checked(_tenants)] = None

    @property
    def capacity(self) -> int:
        """Rows that may wait."""
        return 64 * self.batch_size if self.max_queue_rows is None else self.max_queue_rows


class StartOptions(ProcessOptions, frozen=True):
    """What `Serving.start` takes: the name that the process is found under, and the options."""

    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings:
    """The parts of a `Serving`; see its methods of the same names.

    Attributes:
        streaming: Names of the hooks that are streamed; empty to stream batches only, None not to stream.
    """

    module: Any
    arg: Any = None
    compile_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    process_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batch_size: int | None = None
    client_preprocessing: Callable[[Any], Any] | None = None
    client_postprocessing: Callable[[Any, Any], Any] | None = None
    distributed_postprocessing: Callable[[Any], Any] | None = None
    streaming: tuple[str, ...] | None = None

    def pad_to(self, batch_size: int | None) -> int | None:
        """Return how many rows batches are padded to, if they are."""
        return batch_size if self.process_options.get("pad_to_batch_size") else None


def alike(left: Any, right: Any) -> bool:
    """Return whether two values are equal, arrays in them by their values."""
    if left is right:
        return True
    if isinstance(left, ServingSettings) and isinstance(right, ServingSettings):
        return all(alike(getattr(left, one.name), getattr(right, one.name)) for one in fields(ServingSettings))
    kind = find_kind(left)
    if kind is not None or find_kind(right) is not None:
        return kind is find_kind(right) and kind is not None and kind.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        one, other = cast("Mapping[Any, Any]", left), cast("Mapping[Any, Any]", right)
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        some, others = cast("Sequence[Any]", left), cast("Sequence[Any]", right)
        return type(some) is type(others) and len(some) == len(others) and all(map(alike, some, others))
    try:
        return bool(left == right)
    except (TypeError, ValueError):  # it holds arrays where nobody can see them
        return False


def options_of(settings: ServingSettings, given: Mapping[str, Any]) -> ProcessOptions:
    """Return the options under which a serving is started; `given` stands above what the serving says itself.

    Raises:
        ConfigError: One is unknown or not possible; or two batch sizes were given.
    """
    options = {**settings.process_options, **checked(ProcessOptions, given)}
    own = settings.batch_size
    if own is not None and options.setdefault("batch_size", own) != own:
        raise ConfigError(
            f"the batch size set via batch_size ({own}) does not match the batch size given to the serving process "
            f"({options['batch_size']})"
        )
    return ProcessOptions(**options)


def tenants_of(options: ProcessOptions) -> Tenants | None:
    """Return those who share the partitions; None where calls name no tenant."""
    if options.tenants is None:
        return None
    return Tenants({name: _tenant(name, given) for name, given in options.tenants.items()})


def partitions_of(settings: ServingSettings, options: ProcessOptions) -> list[dict[str, Any]]:
    """Return the compile options of each partition.

    Raises:
        ConfigError: `partitions=True` and the compiler does not know how many there are.
    """
    compile_options = dict(settings.compile_options)
    wanted = options.partitions
    if wanted is True:
        made = _ask_compiler(compile_options)
    elif not isinstance(wanted, bool | int):
        made = [{**compile_options, "device": device} for device in wanted]
    else:
        made = [compile_options] * max(int(wanted), 1)
    return [{**one, "batch_keys": list(options.batch_keys)} for one in made]


def _ask_compiler(compile_options: dict[str, Any]) -> list[dict[str, Any]]:
    from forebay.arrays.compilers import find_compiler

    compiler = find_compiler(compile_options.get("compiler", "python"))
    if not callable(getattr(compiler, "partitions", None)):
        raise ConfigError(
            f"partitions=True asks the compiler how many there are, and {type(compiler).__name__} has no method "
            "partitions(options); give a number or a list of devices"
        )
    options = {name: value for name, value in compile_options.items() if name != "compiler"}
    return [{**compile_options, **one} for one in compiler.partitions(options)]
