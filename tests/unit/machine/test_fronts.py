# SPDX-License-Identifier: Apache-2.0
"""What the owner of a divided server says of its models, however many there are."""

import os
import threading

import pytest

from forebay.machine.children import ChildState
from forebay.machine.fronts import OWNER, DividedServer
from forebay.machine.lifeline import BETWEEN_LINES, MAX_BYTES, Lifeline
from forebay.machine.node_process import NodeProcess


def said_by_a_child(text):
    """What a node process reads when a child says that it is ready."""
    theirs, ours = os.pipe()
    with os.fdopen(theirs, "rb") as pipe:
        thread = threading.Thread(target=Lifeline(ours).ready, args=(text,))
        thread.start()
        said = pipe.readline()
        thread.join()
    os.close(ours)
    return said.decode(errors="replace").rstrip("\n")


@pytest.mark.parametrize("models", [0, 2, 1000, 100_000])
def test_a_server_of_any_number_of_models_begins(monkeypatch, models):
    lines, told = [f"POST /models/model-{number}  version 1, 1 worker slot" for number in range(models)], []
    said = said_by_a_child(BETWEEN_LINES.join(lines))
    states = [ChildState(OWNER, 1, True, 1, said, "")]
    monkeypatch.setattr(NodeProcess, "run", lambda _node, _plan, *, ready, **_: ready(states) or 0)
    server = DividedServer(
        arguments=[], fronts=1, host="127.0.0.1", http_port=0, grpc_port=None, drain_s=1.0, hang_s=0.0, lends=False
    )
    assert server.serve(lambda _part, some: told.extend(some)) == 0
    if models <= 1000:
        assert told == lines
    else:  # the last one that has room may be cut
        assert told[:-1] == lines[: len(told) - 1]
        assert len(told) * len(lines[0]) > MAX_BYTES // 2
