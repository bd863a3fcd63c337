# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false
"""A pipeline of one op that does what its requests say; also the script that its worker processes execute."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

from tests.misbehave import catalogue

from forebay.surfaces.pipeline.config import read
from forebay.surfaces.pipeline.dag.served_graph import ServedGraph
from forebay.surfaces.pipeline.dag.wiring import wire
from forebay.surfaces.pipeline.ops.op import Op, RequestOp, ResponseOp
from forebay.surfaces.pipeline.protocol.messages import Request
from forebay.surfaces.pipeline.script import Script
from forebay.surfaces.pipeline.server import PipelineServer

NAME = "misbehaving"


def settings(*, in_threads):
    return {
        "rpc_port": 18080,
        "worker_num": 8,
        "dag": {"is_thread_op": in_threads},
        "op": {
            NAME: {
                "concurrency": 2 if in_threads else 1,
                "batch_size": 2,
                "auto_batching_timeout": 60_000,
                "batch_style": "list",
                "run_process": True,
            }
        },
    }


class Misbehaving(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        ((_, value),) = input_dicts.items()
        return {"n": int(value["n"]), "way": int(value["way"])}, False, None, ""

    def process(self, feed_batch, typical_logid):
        fine = [{"n": feed["n"]} for feed in feed_batch]
        return catalogue.perform(feed_batch, [feed["way"] for feed in feed_batch], fine)

    def postprocess(self, input_dicts, fetch_dict, data_id, log_id):
        return {"n": str(fetch_dict["n"])}, None, ""


def end():
    return ResponseOp(input_ops=[Misbehaving(name=NAME, input_ops=[RequestOp()])])


def request(number, way):
    return Request(key=["n", "way"], value=[str(number), str(way)])


@contextlib.asynccontextmanager
async def hosted(kind):
    config, _ = read(settings(in_threads=kind == "thread"))
    dag = wire(NAME, end(), config)
    found = ServedGraph(NAME, dag, config, lambda: Script(str(Path(__file__))), itertools.count())
    found.open()
    try:
        await found.endpoint.start()
        yield found.service, found.nodes[NAME].pool
    finally:
        await found.endpoint.drain(0.0)
        await found.close()


if __name__ == "__main__":
    server = PipelineServer(NAME)
    server.set_response_op(end())
    server.prepare_server(yml_dict=settings(in_threads=False))
    server.run_server()
