# SPDX-License-Identifier: Apache-2.0
"""Has the original build random graphs of ops, and tells in which order each op gets its inputs.

.venv/environments/pipeline/bin/python tests/originals/pipeline/record_order.py > tests/originals/pipeline/order.json
"""

# pyright: reportMissingImports=false

import importlib.util
import json
import logging
import os
import random
import sys
import tempfile
import types
from typing import Any

COMMAND = "paddle_serving_server 0.9.0, tests/originals/pipeline/record_order.py"


def drawn(draw):
    """Ops by name and the names of their inputs, `@` for the request; all lead to the last one."""
    graph = {}
    for number in range(draw.randint(2, 9)):
        before = ["@", *graph]
        graph[f"op{number}"] = draw.sample(before, min(len(before), draw.choice([1, 1, 1, 2, 2, 3])))
    unread = set(graph).difference(*graph.values())
    last = draw.sample(sorted(unread), len(unread))
    return {**graph, "last": [*last, *draw.sample(sorted({"@", *graph} - unread), draw.randint(0, 1))]}


def order_of(graph, pipeline):
    """The producers of the channel that each op of the original reads."""
    dag, operator = pipeline
    request = operator.RequestOp()
    ops = {"@": request}
    for name, inputs in graph.items():
        ops[name] = operator.Op(name, input_ops=[ops[one] for one in inputs])
    names = {ops["@"].name: "@"}
    built: Any = object.__new__(dag.DAG)
    built._is_thread_op, built._channel_size, built._channel_recv_frist_arrive = True, 0, False
    built._build_dag_each_worker = False
    built._build_dag(operator.ResponseOp(input_ops=[ops["last"]]))
    return {
        name: [names.get(one, one) for one in ops[name]._get_input_channel().get_producers()]
        or graph[name]  # the first channel is filled by the server itself
        for name in graph
    }


def main():
    package = types.ModuleType("paddle_serving_server")
    found = importlib.util.find_spec("paddle_serving_server")
    assert found is not None
    assert found.submodule_search_locations is not None
    package.__path__ = list(found.submodule_search_locations)
    client = types.ModuleType("paddle_serving_client")
    client.Client = object  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules |= {"paddle_serving_server": package, "paddle_serving_client": client}
    with tempfile.TemporaryDirectory() as folder:  # for its logs
        os.chdir(folder)
        from paddle_serving_server.pipeline import dag, operator

        logging.disable(logging.CRITICAL)
        exchanges = []
        for number in range(60):
            graph = drawn(random.Random(number))
            answer = {"order": order_of(graph, (dag, operator))}
            exchanges.append({"name": f"graph {number}", "request": {"input_ops": graph}, "answer": answer})
    lines = ",\n".join(map(json.dumps, exchanges))
    print(f'{{"source": {json.dumps(COMMAND)}, "exchanges": [\n{lines}\n]}}')


if __name__ == "__main__":
    main()
