# SPDX-License-Identifier: Apache-2.0
"""Draws lines of text, turns every other one upside down, and asks about all of them at once."""

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"


def drawn(number):
    picture = np.full((48, 260, 3), 255, np.uint8)
    cv2.putText(picture, f"Invoice {1000 + number}", (8, 34), cv2.FONT_HERSHEY_SIMPLEX, 1, (20, 20, 20), 2)
    return picture[::-1, ::-1] if number % 2 else picture


def ask(number):
    body = cv2.imencode(".png", drawn(number))[1].tobytes()
    request = urllib.request.Request(URL, body, {"content-type": "image/png"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


with ThreadPoolExecutor(32) as threads:
    answers = list(threads.map(ask, range(32)))
right = sum(answer["upside_down"] == bool(number % 2) for number, answer in enumerate(answers))
shared = any(answer["batch"] > 1 for answer in answers)
print(f"{right} of {len(answers)} right, {'several in a run' if shared else 'each alone'}")
