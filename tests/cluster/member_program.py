# SPDX-License-Identifier: Apache-2.0
"""A program that joins a cluster with servings, and does as each line of its input says.

Its arguments are the address to join and the servings to start, each as NAME or NAME:WEIGHT. It answers each line
(`start NAME WEIGHT`, `stop NAME`, `count NAME`) with one.
"""

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np

import forebay
from forebay import Batch, Serving

COUNTS = {"crash": 0}


def here():
    """Return where this runs: the process, and in a thread of which kind."""
    name = threading.current_thread().name
    return [os.getpid(), "partition" if "where" in name else "loop" if name == "forebay-cluster" else "beside"]


def crash(rows):
    COUNTS["crash"] += 1
    raise ValueError(f"thirteen, for the {COUNTS['crash']}th time")


def gate(batch):
    """Run until the file is there that the rows name."""
    path = bytes(batch.realize()[0]).rstrip(b"\0").decode()
    Path(f"{path}.begun").write_text(str(os.getpid()))
    while not Path(path).exists():
        time.sleep(0.005)
    return np.full(batch.size, os.getpid())


def hooked(batch):
    rows = forebay.hook("double", batch.realize() * 2)
    return rows + 1


async def coroutine(given):
    return Batch.concatenate([np.asarray(given)]), "info"


def streamed_doubled(stream, _info):
    for kind, output, *_ in stream:
        yield kind, output * 2


def of(function):
    return Serving.new(lambda _options: function)


def where(batch):
    WHERE.append(here())
    return batch.realize()


WHERE = []


def where_before(given):
    WHERE.append(here())
    return Batch.concatenate([np.asarray(given["rows"])]), given


def where_after(executed, given):
    return {"rows": executed[0], "seen": [*given["seen"], *WHERE, here()]}


def where_last(answer):
    WHERE.clear()
    return {**answer, "last": here()}


def texts(given):
    """Make batches of an iterator of texts."""
    return (Batch.concatenate([np.array([len(text)])]) for text in given), None


SERVINGS = {
    "double": lambda: of(lambda batch: batch.realize() * 2),
    "who": lambda: of(lambda batch: np.full(batch.size, os.getpid())),
    "crash": lambda: of(crash),
    "gate": lambda: of(gate),
    "plus": lambda: of(lambda batch: batch.realize() + 1).streaming(),
    "halt": lambda: of(lambda batch: crash(batch) if 13 in batch.realize() else batch.realize()).streaming(),
    "hooked": lambda: of(hooked).streaming(["double"]),
    "doubled": lambda: of(lambda batch: batch.realize() + 1).streaming().client_postprocessing(streamed_doubled),
    "coroutine": lambda: of(lambda batch: batch.realize() * 3).client_preprocessing(coroutine),
    "texts": lambda: of(lambda batch: batch.realize()).client_preprocessing(texts),
    "odd": lambda: of(lambda batch: batch.realize()).client_postprocessing(lambda executed, _info: {1, 2}),
    "refusing": lambda: of(lambda batch: batch.realize()).client_preprocessing(lambda given: given["absent"]),
    "where": lambda: (
        of(where)
        .client_preprocessing(where_before)
        .client_postprocessing(where_after)
        .distributed_postprocessing(where_last)
    ),
}


def main():
    address, *wanted = sys.argv[1:]
    running = {}

    def start(name, weight="1"):
        options = {"batch_size": 2, "batch_timeout_ms": 2, "distribution_weight": int(weight)}
        running[name] = SERVINGS[name]().start(name=name, **options)

    tls = os.environ.get("MEMBER_TLS")
    files = {"cafile": f"{tls}/ca.pem", "certfile": f"{tls}/node.pem"} if tls else {}
    with forebay.cluster.join(address, **files) as membership:
        for one in wanted:
            start(*one.split(":"))
        print(membership.address, flush=True)
        for line in sys.stdin:
            command, *arguments = line.split()
            match command:
                case "start":
                    start(*arguments)
                case "stop":
                    running.pop(*arguments).stop()
                case "count":
                    print(COUNTS[arguments[0]], flush=True)
                    continue
            print("done", flush=True)


if __name__ == "__main__":
    main()
