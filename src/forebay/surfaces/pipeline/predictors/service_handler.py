# SPDX-License-Identifier: Apache-2.0
"""`LocalServiceHandler`: a model of an op's own, as scripts of the original make one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.surfaces.pipeline.predictors.clients import client_for
from forebay.surfaces.pipeline.predictors.descriptions import DESCRIPTIONS, describe
from forebay.surfaces.pipeline.predictors.general_face import GeneralModelFace
from forebay.surfaces.pipeline.predictors.local_models import is_reference
from forebay.surfaces.pipeline.predictors.model_settings import LocalConf, PredictorSettings

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.predictors.model_client import Predictor


class LocalServiceHandler:
    """A model, and the process that runs it: this one, or one that is started for it."""

    def __init__(  # noqa: PLR0913, PLR0917 - the original's signature
        self,
        model_config: str,
        client_type: str = "local_predictor",
        workdir: str = "",
        thread_num: int = 2,
        device_type: int = -1,
        devices: str = "",
        fetch_names: Sequence[str] | None = None,
        mem_optim: bool = True,
        ir_optim: bool = False,
        available_port_generator: Any = None,
        use_profile: bool = False,
        precision: str = "fp32",
        use_mkldnn: bool = False,
        mkldnn_cache_capacity: int = 0,
        mkldnn_op_list: Sequence[str] | None = None,
        mkldnn_bf16_op_list: Sequence[str] | None = None,
        min_subgraph_size: int = 3,
        dynamic_shape_info: Any = None,
        use_calib: bool = False,
    ) -> None:
        """Describe the model; `LocalConf` says what the arguments mean.

        Ports are chosen by the system and profiles are the server's, so `available_port_generator`, `use_profile` and
        `dynamic_shape_info` are taken and not used.

        Raises:
            ConfigError: If one of them is wrong.
        """
        given = {name: value for name, value in locals().items() if name in LocalConf.__struct_fields__}
        # A model without a poll is the script's own, to keep or to change.
        conf = LocalConf(**given, fetch_list=fetch_names, model_poll_s=0)
        self._settings = PredictorSettings(name=Path(model_config).name, local_service_conf=conf).checked()
        self._face: GeneralModelFace | None = None

    def get_fetch_list(self) -> list[str]:
        """Return the aliases of the results that are wanted, or of all."""
        if self._settings.wanted:
            return list(self._settings.wanted)
        model_config = self.get_model_config()
        found = None if is_reference(model_config) else describe(Path(model_config))
        return [] if found is None else [var.alias for var in found.fetches]

    def get_model_config(self) -> str:
        """Return where the model is."""
        return str(self._settings.local_service_conf.model_config)

    def get_client_config(self) -> str:
        """Return where the description of the model is, or would be."""
        return str(Path(self.get_model_config()) / DESCRIPTIONS[0])

    def get_port_list(self) -> list[int]:
        """Return the port of the processes that were started for the model; none for one in this process."""
        return [] if self._face is None else [self._face.server_port]

    def prepare_server(self) -> None:
        """Start the processes, if any are wanted; the original only reserves their ports here.

        Raises:
            ModelError: If one cannot be started.
        """
        if self._settings.kind != "local_predictor" and self._face is None:
            self._face = GeneralModelFace(self.get_client())

    def start_server(self) -> None:
        """Start the processes, if `prepare_server` was not called before."""
        self.prepare_server()

    def get_client(self, concurrency_idx: int | None = None) -> Predictor:
        """Return what predicts: a model of its own for each call, or a client of the processes.

        Args:
            concurrency_idx: Number of the worker process, which decides on the device; None in threads.
        """
        return client_for(self._settings, concurrency_idx=concurrency_idx, process=False)

    def close(self) -> None:
        """End the processes, once the clients are closed as well."""
        if self._face is not None:
            self._face.close()
            self._face = None
