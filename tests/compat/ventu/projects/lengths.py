# SPDX-License-Identifier: Apache-2.0
"""A project as its author wrote it for the original; both sides of the comparison run this file."""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

import argparse
import os
import time
from pathlib import Path

from ventu import Ventu  # pyright: ignore[reportAttributeAccessIssue]

try:
    from pydantic.v1 import BaseModel, confloat, constr
except ImportError:
    from pydantic import BaseModel, confloat, constr


class Req(BaseModel):
    text: constr(min_length=2, max_length=5000)

    class Config:
        schema_extra = {"example": {"text": "hello"}, "batch_size": 2}  # noqa: RUF012 - as projects write it


class Resp(BaseModel):
    n: confloat(ge=0, le=100)
    batch: int = 0


class Lengths(Ventu):
    """Lengths of texts."""

    def inference(self, data):
        return data.text, 0

    def batch_inference(self, batch):
        if any(item.text == "die" for item in batch):
            os._exit(3)
        pauses = [float(item.text.split()[1]) for item in batch if item.text.startswith("pause")]
        if pauses:
            if "STARTED" in os.environ:
                Path(os.environ["STARTED"]).touch()
            time.sleep(max(pauses))
            while "UNTIL" in os.environ and not Path(os.environ["UNTIL"]).exists():
                time.sleep(0.005)
        return [(item.text, len(batch)) for item in batch]

    def postprocess(self, data):
        text, batch = data
        if text == "raise":
            raise RuntimeError(text)
        return {"n": len(text), "batch": batch} if batch else {"n": len(text)}


def create_model():
    return Lengths(Req, Resp, use_msgpack="MSGPACK" in os.environ, name="Lengths")


def create_app():
    return create_model().app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["http", "unix", "tcp"])
    parser.add_argument("address")
    options = parser.parse_args()
    model = create_model()
    if options.mode == "unix":
        model.run_unix(options.address)
    elif options.mode == "tcp":
        model.run_tcp("127.0.0.1", int(options.address))
    else:
        model.run_http("127.0.0.1", int(options.address))
