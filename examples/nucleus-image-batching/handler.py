# SPDX-License-Identifier: Apache-2.0
"""Tells whether pictures of a line of text stand upside down: many requests, one run of a real network."""

from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import onnxruntime
from starlette.responses import JSONResponse

MODEL = "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"
HEIGHT, WIDTH = 48, 192


class Handler:
    def __init__(self, config):
        package = find_spec("rapidocr_onnxruntime")  # only its model is used
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(Path(package.origin).parent / MODEL, options)

    def handle_post(self, payload):
        """The payload is the list of the bodies of all requests in the batch."""
        pictures = [decoded(body) for body in payload]
        good = [picture for picture in pictures if picture is not None]
        scores = iter(self.session.run(None, {"x": np.stack(good)})[0] if good else ())
        return [refusal() if picture is None else answer(next(scores), len(good)) for picture in pictures]


def decoded(body):
    """What the network takes: 48 pixels high, padded to the right, from -1 to 1; None if it is no picture."""
    picture = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR) if type(body) is bytes and body else None
    if picture is None:
        return None
    width = min(WIDTH, max(1, round(picture.shape[1] * HEIGHT / picture.shape[0])))
    found = np.zeros((3, HEIGHT, WIDTH), np.float32)
    found[:, :, :width] = cv2.resize(picture, (width, HEIGHT)).transpose(2, 0, 1) / 127.5 - 1
    return found


def answer(scores, size):
    return {"upside_down": bool(scores[1] > scores[0]), "score": round(float(scores.max()), 3), "batch": size}


def refusal():
    return JSONResponse({"error": "expected a PNG or JPEG file as the body"}, status_code=400)
