# SPDX-License-Identifier: Apache-2.0
"""What a script says of its server before it runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.config import PipelineConfig
    from forebay.surfaces.pipeline.ops.op import ResponseOp


class PreparedServer:
    """A graph of ops and its configuration.

    Attributes:
        name: What requests may name it as; without a name any is accepted.
        response_op: The end of its graph.
        config: What `prepare_server` read.
        warnings: Its warnings, about keys that nothing reads.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or ""
        self.response_op: ResponseOp | None = None
        self.config: PipelineConfig | None = None
        self.warnings: list[str] = []
