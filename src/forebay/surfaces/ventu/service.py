# SPDX-License-Identifier: Apache-2.0
"""All that a Ventu object consists of, in one attribute: every other name belongs to the classes that inherit it."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Final

from forebay.surfaces.ventu.inference import HookFailed, Inference, ModelHooks, Steps
from forebay.surfaces.ventu.media_codecs import Json, MsgPack, Serialisation
from forebay.surfaces.ventu.metrics import Metrics
from forebay.surfaces.ventu.openapi import document
from forebay.surfaces.ventu.service_pages import Reply, reply_to
from forebay.types.failures import without_frames, words_of
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.surfaces.ventu.schema import Schema

log = logging.getLogger("ventu.service")

SUMMARY: Final = "Deep learning model inference"


class Service:
    """A Ventu object as the faces see it.

    Attributes:
        media: What it speaks.
        steps: Its hooks, in order and timed.
        inference: From the bytes of requests to those of answers.
    """

    def __init__(self, model: ModelHooks, request: Schema, response: Schema) -> None:
        self.model = model
        self.media: Serialisation = MsgPack() if model.use_msgpack else Json()
        self.request = request
        self.response = response
        self.metrics = Metrics()
        self.steps = Steps(model, self.metrics)
        self.inference = Inference(self.steps, request, response, self.media, self.metrics)

    def answer(self, body: bytes) -> Reply:
        """Answer one body with `inference`; an empty one is an object without fields."""
        outcome = self.inference.one(body or self.media.nothing)
        if isinstance(outcome, HookFailed):
            log.error("Inference failed", exc_info=outcome.error)
            without_frames(outcome.error)
        return reply_to(outcome, self.media)

    def is_well(self) -> bool:
        """Tell whether the example, if there is one, still has its result."""
        _, error = caught(self.model.health_check)
        if error is not None:
            log.warning("Service health check error: %s", words_of(error))
        return error is None

    def document(self) -> str:
        """Return the OpenAPI document, in JSON."""
        model = self.model
        about = inspect.cleandoc(type(model).__doc__ or "")
        return document(
            title=model.config.name,
            version=model.config.version,
            summary=about.partition("\n")[0] or SUMMARY,
            media=self.media.name,
            request=self.request,
            response=self.response,
        )
