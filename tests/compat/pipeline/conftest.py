# SPDX-License-Identifier: Apache-2.0
"""Pipelines as tests need them: graphs on workers of this process, and scripts behind a real server."""

import asyncio
import contextlib
import itertools
import math
import textwrap
import time

import pytest
import yaml

from forebay.surfaces.pipeline.config import read
from forebay.surfaces.pipeline.dag.served_graph import ServedGraph
from forebay.surfaces.pipeline.dag.wiring import wire
from forebay.surfaces.pipeline.ops.op import ResponseOp
from forebay.surfaces.pipeline.protocol.messages import Request


@contextlib.asynccontextmanager
async def hosting(last, config=None, name=""):
    """A graph that ends in `last`, or in a ResponseOp, on threads of this process; gives its service."""
    end = last if isinstance(last, ResponseOp) else ResponseOp(input_ops=[last])
    settings, _ = read({"rpc_port": 18080, "worker_num": 64, **(config or {})})
    dag = wire(name or "pipeline", end, settings)
    hosted = ServedGraph(name, dag, settings, _no_script, itertools.count())
    hosted.open()
    try:
        await hosted.endpoint.start()
        yield hosted.service
    finally:
        await hosted.endpoint.drain(1.0)
        await hosted.close()


def _no_script():
    raise AssertionError("ops in threads need no script")


async def ask(service, timeout_s=20.0, logid=0, **values):
    """The answer to one request."""
    request = Request(key=list(values), value=list(values.values()), logid=logid)
    return await answer_of(service, request, timeout_s)


async def answer_of(service, request, timeout_s=20.0):
    """What a service answers; raises what its ports tell as faults of theirs."""
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    return await service.answer(request, deadline=deadline, peer="test")


def values_of(response):
    """The pairs of an answer without an error."""
    assert response.err_no == 0, response.err_msg
    return dict(zip(response.key, response.value, strict=True))


@pytest.fixture
def hosted():
    """Runs a coroutine function with the service of a graph: `hosted(last_op, use, config)`."""

    def run(last, use, config=None, name=""):
        async def main():
            async with hosting(last, config, name) as service:
                return await use(service)

        return asyncio.run(main())

    return run


@pytest.fixture
def pipeline(serve, tmp_path):
    """Serves a script over HTTP: `pipeline(text, config)`; config.yml lies beside the script."""

    def start(text, config=None, *options, ready=True, **more):
        path = tmp_path / "server.py"
        path.write_text(textwrap.dedent(text))
        settings = {"http_port": 18081, "worker_num": 16, **(config or {})}
        (tmp_path / "config.yml").write_text(yaml.safe_dump(settings))
        return serve(path, *options, ready=ready, env={"XDG_STATE_HOME": str(tmp_path / "state")}, **more)

    return start


def post(server, path="/svc/prediction", timeout_ms=None, **values):
    """POSTs pairs; returns the answer's JSON."""
    headers = {} if timeout_ms is None else {"X-Request-Timeout-Ms": str(timeout_ms)}
    body = {"key": list(values), "value": list(values.values())}
    response = server.client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()
