# SPDX-License-Identifier: Apache-2.0
"""Programs that join different nodes of a deployment; none of them has anything to do with Ray."""

import os
import signal
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.cluster.conftest import knows, programs
from tests.waiting import eventually

import forebay
from forebay import Batch, ConfigError
from forebay.cluster.node_folder import folders


def cat(*rows):
    return Batch.concatenate([np.array(rows)])


def programs_of_different_nodes_call_each_other(life):
    """What S65 to S70 say of programs that run other code and have joined other nodes, one of which has other ones."""
    state, folder = life.state(), next(iter(folders(life.name)))
    doors = [state.doors[node] for node in sorted(life.fronts)]
    secret, tls = f"@{folder.path}/secret", getattr(life, "tls", None)
    env = {"FOREBAY_SECRET": secret, **({"MEMBER_TLS": str(tls)} if tls else {})}
    files: Any = {"cafile": f"{tls}/ca.pem", "certfile": f"{tls}/node.pem"} if tls else {}
    with pytest.raises(ConfigError, match="programs join elsewhere, see: forebay cluster status"):
        forebay.cluster.join(state.owners[0].address, secret=secret, **files)
    with programs() as start, forebay.cluster.join(doors[0], secret=secret, **files) as membership:
        far = start(doors[1], "who:3", "double", "plus", "where", "crash", env=env)
        near = start(doors[2], "who", env=env)
        for one in (far, near):
            one.wait_ready()
        knows(membership, who=2, where=1)
        assert forebay.batched_run("double", cat(1, 2)).tolist() == [2, 4]  # S65, S70
        found = Counter(int(forebay.batched_run("who", cat(1))[0]) for _ in range(400))
        assert 300 - 36 < found[far.pid] < 300 + 36  # S66
        answer = forebay.batched_run("where", np.array([1]), lambda rows: {"rows": rows, "seen": [os.getpid()]})
        assert [answer["seen"][0], answer["last"][0]] == [os.getpid(), far.pid]  # S67
        with pytest.raises(forebay.ServingCrashed):
            forebay.batched_run("crash", cat(1))
        assert far.say("count crash") == "1"  # S68
        events = forebay.batched_run("plus", (cat(number) for number in range(3)))
        assert [output.tolist() for _, output, *_ in events] == [[1], [2], [3]]  # S69
        node = sorted(life.fronts)[1]
        front = life.children(node)["front"]
        os.kill(front, signal.SIGKILL)
        for _ in range(20):
            assert forebay.batched_run("double", cat(1)).tolist() == [2]
        assert far.say("start halt 1") == "done"
        knows(membership, halt=1, who=2)
    eventually(lambda: life.children(node)["front"] != front and life.are_ready(node), "the front again")
