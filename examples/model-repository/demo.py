# SPDX-License-Identifier: Apache-2.0
"""Serves a folder of real models that are loaded when they are asked for, and puts a new version of one there.

The models lie in wheels: Magika's, which knows what a file is, and two of RapidOCR's, which tell how a line of text is
turned and what it says. The same works with `s3://bucket/models` in place of the folder.
"""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

LIMIT_S = 60.0


def in_wheel(package, path):
    return Path(find_spec(package).origin).parent / path


def put(file, folder):
    """Puts a version there as those do who are careful: beside it, then by its name."""
    coming = folder.with_name(".coming")
    coming.mkdir(parents=True)
    shutil.copy(file, coming / "model.onnx")
    coming.rename(folder)


def ask(url, body=None):
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    if body is not None:
        request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


def loaded(url):
    return [one["name"] for one in ask(f"{url}/models")["models"] if one["ready"]]


def wait_for(check):
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            if found := check():
                return found
        except urllib.error.URLError:
            pass
        if time.monotonic() > deadline:
            sys.exit("it took too long")
        time.sleep(0.1)


def main():
    ocr = "rapidocr_onnxruntime"
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        models = Path(name) / "models"
        put(in_wheel("magika", "models/standard_v3_3/model.onnx"), models / "file-type" / "1")
        put(in_wheel(ocr, "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"), models / "text-line" / "1")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "forebay.cli.main", "serve", str(models), "--http-port", str(port)]
        command += ["--max-models", "1", "--worker-kind", "thread", "--repository-poll-s", "0.5"]
        url = f"http://127.0.0.1:{port}"
        server = subprocess.Popen([*command, "--log-level", "warning"])
        try:
            wait_for(lambda: ask(f"{url}/readyz"))
            print("in memory at the start:", loaded(url))
            start = Path(__file__).read_bytes()
            features = [*start[:1024], *start[-1024:]]
            scores = ask(f"{url}/models/file-type", {"bytes": features})["target_label"]
            labels = json.loads(in_wheel("magika", "models/standard_v3_3/config.min.json").read_text())
            kind = labels["target_labels_space"][scores.index(max(scores))]
            print(f"this file is {kind}; in memory:", loaded(url))
            line = {"x": [[[0.0] * 192] * 48] * 3}
            (answer,) = ask(f"{url}/models/text-line", line).values()
            print(f"version 1 of text-line gives {len(answer)} numbers; in memory:", loaded(url))
            put(in_wheel(ocr, "models/ch_PP-OCRv4_rec_infer.onnx"), models / "text-line" / "2")

            def changed():
                (found,) = ask(f"{url}/models/text-line", line).values()
                return len(found) != len(answer) and len(found)

            print(f"version 2 was put there, and text-line gives {wait_for(changed)} numbers; in memory:", loaded(url))
        finally:
            server.terminate()
            server.wait(LIMIT_S)


if __name__ == "__main__":
    main()
