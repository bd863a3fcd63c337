# SPDX-License-Identifier: Apache-2.0
"""The objects a script ends with: `PipelineServer`, and `WebService` around one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError, ForebayError
from forebay.surfaces.pipeline import script
from forebay.surfaces.pipeline.config import read
from forebay.surfaces.pipeline.ops.op import Op, RequestOp, ResponseOp
from forebay.surfaces.pipeline.prepared_server import PreparedServer


class PipelineServer(PreparedServer):
    """A graph of ops behind a gRPC port and an HTTP port."""

    def set_response_op(self, response_op: Any) -> None:
        """Say where the graph ends.

        Raises:
            ConfigError: If it is not a `ResponseOp` with one input op.
        """
        if not isinstance(response_op, ResponseOp):
            raise ConfigError(f"set_response_op(): expected a ResponseOp, got {type(response_op).__name__}")
        count = len(response_op.get_input_ops())
        if count != 1:
            raise ConfigError(f"ResponseOp: expected one input op, the last op of the graph, got {count}")
        self.response_op = response_op

    def prepare_server(self, yml_file: str | Path | None = None, yml_dict: Mapping[str, Any] | None = None) -> None:
        """Read the configuration, from a file or from a dict.

        Raises:
            ConfigError: If both or none are given, or what is read is wrong.
        """
        source = yml_dict if yml_file is None else yml_file
        if source is None or (yml_file is not None and yml_dict is not None):
            found = "neither" if source is None else "both"
            raise ConfigError(f"prepare_server(): expected yml_file or yml_dict, got {found}")
        self.config, self.warnings = read(source)
        if self.config.rpc_port is None and self.config.http_port is None:
            place = "yml_dict" if yml_file is None else yml_file
            raise ConfigError(f"{place}: expected rpc_port or http_port, got neither")

    def run_server(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            ConfigError: If the server was not prepared.
            SystemExit: If it cannot start; the log has the reason.
        """
        if self.response_op is None or self.config is None:
            missing = "set_response_op()" if self.response_op is None else "prepare_server()"
            raise ConfigError(f"run_server() was called before {missing}")
        script.hand_over(self)
        from forebay.surfaces.pipeline.surface import serve

        try:
            status = serve(self)
        except ForebayError as error:
            sys.exit("\n".join(filter(None, (f"forebay: {error.message}", error.trace))))
        if status:
            sys.exit(status)


class WebService:
    """A graph from one request op to one last op, with a name; override `get_pipeline_response` to build it."""

    def __init__(self, name: str = "default_service") -> None:
        self.name = name
        self._server = PipelineServer(name)

    def get_pipeline_response(self, read_op: RequestOp) -> Any:
        """Build the graph behind `read_op` and return its last op; override this."""
        return None

    def prepare_pipeline_config(
        self, yml_file: str | Path | None = None, yml_dict: Mapping[str, Any] | None = None
    ) -> None:
        """Build the graph and read the configuration.

        Raises:
            ValueError: If `get_pipeline_response` does not return an `Op`.
            ConfigError: If the configuration is wrong.
        """
        last = self.get_pipeline_response(RequestOp())
        if not isinstance(last, Op):
            msg = f"get_pipeline_response() of '{self.name}' returned {type(last).__name__}; it must return the last Op"
            raise ValueError(msg)  # noqa: TRY004 - as the original does
        self._server.set_response_op(ResponseOp(input_ops=[last]))
        self._server.prepare_server(yml_file, yml_dict)

    def run_service(self) -> None:
        """Serve until SIGTERM or SIGINT; see `PipelineServer.run_server`."""
        self._server.run_server()
