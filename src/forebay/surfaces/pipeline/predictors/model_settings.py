# SPDX-License-Identifier: Apache-2.0
"""What an op is told about its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from forebay.errors import ConfigError
from forebay.server.config_document import Document
from forebay.server.struct_reader import StructReader
from forebay.types.did_you_mean import either, meant
from forebay.types.settings import Checked, Count, Workers, Written, declared, with_value

ClientType = Literal["local_predictor", "brpc", "grpc", "pipeline_grpc"]
LocalClientType = Literal["local_predictor", "brpc", "grpc"]
DEFAULT_TIMEOUT_S: Final = 60.0
"""How long a remote model may take where the op has no timeout of its own: nothing waits for ever."""
MAX_POLL_S: Final = 86_400.0
_PRECISIONS: Final = ("fp32", "fp16", "bf16", "int8")


def _precision(value: str) -> str:
    if value.lower() not in _PRECISIONS:
        raise ValueError(f"expected {either(_PRECISIONS)}{meant(value, _PRECISIONS)}")
    return value.lower()


def _devices(value: object) -> str | int:
    if isinstance(value, str | int) and all(not word or word.isdecimal() for word in _words(value)):
        return value
    raise ValueError("expected numbers separated by commas, such as '0,1'")


def _words(devices: str | int) -> list[str]:
    return [word.strip() for word in str(devices).split(",")]


class LocalConf(msgspec.Struct, frozen=True, kw_only=True):
    """`local_service_conf`: a model in this process, or in one that is started for it.

    Attributes:
        model_config: The folder of the model, its file, or `module:callable`; None for an op without a model.
        client_type: `local_predictor`; `brpc` and `grpc` start a process for the model.
        fetch_list: The results that are wanted.
        workdir: Where a process that is started for the model runs; empty for the server's own folder.
        model_poll_s: Seconds between two looks at whether the files of the model have changed; 0 never looks.
        thread_num: Threads that compute one prediction.
        device_type: -1 as `devices` says, 0 CPU, 1 GPU, 2 TensorRT, 3 ARM CPU, 4 XPU, 5 and 6 Ascend, 7 IPU.
        devices: Numbers of the devices, separated by commas, which the workers share out; empty for the CPU.
        mem_optim: Let Paddle reuse memory.
        ir_optim: Let Paddle rewrite the model.
        precision: fp32, fp16, bf16 or int8.
        use_calib: For TensorRT; ignored.
        use_mkldnn: Let Paddle use oneDNN.
        mkldnn_cache_capacity: Shapes that oneDNN keeps; Paddle only.
        mkldnn_op_list: Operators that oneDNN computes; Paddle only.
        mkldnn_bf16_op_list: Operators that oneDNN computes in bf16; Paddle only.
        min_subgraph_size: For TensorRT; ignored.
        use_encryption_model: Not supported.
        encryption_key: Not supported.
    """

    model_config: str | None = None
    client_type: LocalClientType | None = None
    fetch_list: Sequence[str] | None = None
    workdir: str = ""
    model_poll_s: Annotated[float, Meta(ge=0, le=MAX_POLL_S)] = 1.0
    thread_num: Workers = 2
    device_type: Annotated[int, Meta(ge=-1, le=7)] = -1
    devices: Annotated[str | int, Checked(_devices), Written(is_verbatim=True)] = ""
    mem_optim: bool = True
    ir_optim: bool = False
    precision: Annotated[str, Checked(_precision)] = "fp32"
    use_calib: bool = False
    use_mkldnn: bool = False
    mkldnn_cache_capacity: Annotated[int, Meta(ge=0)] = 0
    mkldnn_op_list: Sequence[str] | None = None
    mkldnn_bf16_op_list: Sequence[str] | None = None
    min_subgraph_size: Count = 3
    use_encryption_model: bool = False
    encryption_key: str | None = None

    @property
    def device_ids(self) -> list[int]:
        """The numbers in `devices`."""
        return [int(word) for word in _words(self.devices) if word]

    def device_of(self, index: int | None) -> int | None:
        """Return the device of a worker, or None for the CPU; threads, which have no index, take the first."""
        ids = self.device_ids
        if self.device_type in {0, 3} or (self.device_type == -1 and not ids):
            return None
        return ids[(index or 0) % len(ids)] if ids else 0

    def checked(self) -> LocalConf:
        """Return it if it can be used; raises ConfigError if not."""
        _refuse_encryption(self)
        for name, setting in declared(type(self)).items():
            value = getattr(self, name)
            try:
                setting.check(value, in_python=True)
            except ValueError as error:
                raise ConfigError(f"{name}: {with_value(error, repr(value))}") from error
        return self


class OpModel(msgspec.Struct, frozen=True, kw_only=True):
    """Which model an op asks, and how.

    Attributes:
        client_type: `brpc`, `grpc`, `local_predictor` or `pipeline_grpc`; None is local, or `brpc` with endpoints.
        server_endpoints: Remote servers of the same model, asked in turn: `host:port`, with a scheme before it and the
            name of a KServe model behind it if wanted: `http://10.0.0.7:8080/iris`.
        client_config: File or folder that describes the remote model's inputs and outputs; None asks a KServe server.
        fetch_list: The results that are wanted; none for all.
        endpoint_protocol: `kserve_v2` or `paddle`; None is `kserve_v2` for `grpc` and `paddle` for `brpc`.
        use_encryption_model: Not supported.
        encryption_key: Not supported.
    """

    client_type: ClientType | None = None
    server_endpoints: Sequence[str] | None = None
    client_config: str | None = None
    fetch_list: Sequence[str] | None = None
    endpoint_protocol: Literal["kserve_v2", "paddle"] | None = None
    use_encryption_model: bool | None = None
    encryption_key: str | None = None


class PredictorSettings(OpModel, frozen=True, kw_only=True):
    """All that decides which client an op gets.

    Attributes:
        name: The op, for messages, and the remote model's name where an endpoint has none.
        local_service_conf: The model without endpoints.
        timeout_ms: How long a remote model may take, all tries included; None or 0 and less for a minute.
        pack_tensors: Send tensors instead of texts to another pipeline.
    """

    name: str = "op"
    local_service_conf: LocalConf = LocalConf()
    timeout_ms: float | None = None
    pack_tensors: bool = False

    @classmethod
    def of_op(cls, name: str, settled: Mapping[str, Any], *, pack_tensors: bool = False) -> PredictorSettings:
        """Read an op's settings, those of other concerns left aside.

        Args:
            settled: Its settings under their names in the configuration; None counts as not given.

        Raises:
            ConfigError: If one has the wrong type or cannot be used.
        """
        given = {key: value for key, value in settled.items() if key in cls.__struct_fields__ and value is not None}
        given |= {"name": name, "pack_tensors": pack_tensors, "timeout_ms": settled.get("timeout")}
        return _Reader(Document(f"op '{name}'", given)).struct((), given, cls).checked()

    @property
    def kind(self) -> str | None:
        """The type of client that is used, or None for an op without a model."""
        if self.server_endpoints:
            return self.client_type or "brpc"
        if self.local_service_conf.model_config is None:
            return None
        return self.local_service_conf.client_type or "local_predictor"

    @property
    def protocol(self) -> str:
        """What a remote server speaks."""
        return self.endpoint_protocol or ("kserve_v2" if self.kind == "grpc" else "paddle")

    @property
    def wanted(self) -> Sequence[str]:
        """The results an op asks for when it names none."""
        return self.fetch_list or self.local_service_conf.fetch_list or ()

    @property
    def timeout_s(self) -> float:
        """How long a remote model may take."""
        return self.timeout_ms / 1000 if self.timeout_ms is not None and self.timeout_ms > 0 else DEFAULT_TIMEOUT_S

    def checked(self) -> PredictorSettings:
        """Return it if it can be used; raises ConfigError if not."""
        if self.server_endpoints and self.kind == "local_predictor":
            raise ConfigError(
                f"op '{self.name}' has server_endpoints and the client_type local_predictor, which calls no server; "
                "leave one of them out"
            )
        try:
            _refuse_encryption(self)
            self.local_service_conf.checked()
        except ConfigError as error:
            raise ConfigError(f"op '{self.name}': {error.message}") from None
        return self


class _Reader(StructReader):
    is_lenient = True


def _refuse_encryption(given: LocalConf | PredictorSettings) -> None:
    if given.use_encryption_model or given.encryption_key:
        msg = "encrypted models are not supported; decrypt the model and leave out use_encryption_model and its key"
        raise ConfigError(msg)
