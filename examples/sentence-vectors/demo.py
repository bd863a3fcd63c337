# SPDX-License-Identifier: Apache-2.0
"""Starts the server, asks it for the vectors of many sentences at once and compares them with those of the notebook."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from notebook import SENTENCES, nearest_pairs, serving

HERE = Path(__file__).resolve().parent
STOP_LIMIT_S = 20.0


def ask(url: str, sentence: str) -> list[float]:
    request = urllib.request.Request(url, json.dumps(sentence).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def main() -> int:
    command = [sys.executable, "-m", "forebay", "serve", str(HERE / "model.py"), "--http-port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        found = next((match for line in server.stderr if (match := re.search(r"ready at (http://\S+)", line))), None)
        if found is None:
            print("the server did not start")
            return 1
        url = f"{found[1]}/models/sentence-vectors"
        with ThreadPoolExecutor(16) as executor:
            served = np.array(list(executor.map(lambda sentence: ask(url, sentence), SENTENCES * 8)))
        with urllib.request.urlopen(url, timeout=30) as answer:
            batching = json.load(answer)["batching"]
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=STOP_LIMIT_S)
    for sentence, other, score in nearest_pairs(served[: len(SENTENCES)]):
        print(f"{score:.2f}  {sentence:<56} {other}")
    print(f"{len(served)} sentences in {batching['batches']} batches")
    # The model rounds to 8 bits by the range of the whole batch, so a vector depends a little on its batch-mates.
    alike = (served * np.tile(serving.run(SENTENCES), (8, 1))).sum(axis=1)
    return 0 if alike.min() > 0.98 and server.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
