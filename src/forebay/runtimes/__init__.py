# SPDX-License-Identifier: Apache-2.0
"""Model files and the libraries that run them: what a file takes and gives, and how it is asked.

    net = forebay.runtimes.load("net.onnx")
    net({"x": rows})["y"]

Nothing here knows requests, and nothing here is imported by a worker that has no model file.
"""

from forebay.runtimes.library import PaddleOptions, RunOptions
from forebay.runtimes.model_file import ModelFile, load
from forebay.runtimes.signature import Signature, Var
from forebay.types.devices import Device

__all__ = ["Device", "ModelFile", "PaddleOptions", "RunOptions", "Signature", "Var", "load"]
