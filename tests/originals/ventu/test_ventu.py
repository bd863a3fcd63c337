# SPDX-License-Identifier: Apache-2.0
"""The same project with ours: each answer over HTTP, and of a worker on a socket, is the original's."""

import contextlib
import sys

import httpx
import pytest
from tests.compat.ventu.conftest import LENGTHS, OURS, Front, Process
from tests.originals.replay import assert_as_recorded, exchanges, sent
from tests.originals.ventu.record import answer_of
from tests.ports import free_port
from tests.waiting import PATIENCE_S, eventually

PAGE = "src/forebay/surfaces/ventu/README.md"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Starts the project with our names in place of the original's."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, codec):
            environment = {"MSGPACK": "1"} if codec == "msgpack" else {}
            log = tmp_path_factory.mktemp("ventu") / "log"
            made = Process([sys.executable, "-c", OURS, LENGTHS, *arguments], log, **environment)
            stack.callback(made.kill)
            return made

        yield start


@pytest.fixture(scope="module")
def clients(ours):
    """A client of a server of ours for each codec."""
    with contextlib.ExitStack() as stack:
        found = {}
        for codec in ("json", "msgpack"):
            port = free_port()
            server = ours("http", port, codec=codec)
            client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S))

            def is_up(client=client):
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/").status_code == 200

            eventually(is_up, server.log.read_text)
            found[codec] = client
        yield found


@pytest.fixture(scope="module")
def fronts(ours, tmp_path_factory):
    """A batching service with a worker of ours for each codec."""
    with contextlib.ExitStack() as stack:
        found = {}
        for codec in ("json", "msgpack"):
            front = found[codec] = Front(str(tmp_path_factory.mktemp("front") / "socket"))
            stack.callback(front.close)
            ours("unix", front.listener.getsockname(), codec=codec)
            front.accept()
        yield found


@pytest.mark.parametrize("exchange", exchanges("ventu/http-json.json"))
def test_http_in_json(clients, exchange):
    assert_as_recorded(exchange, sent(clients["json"], exchange), page=PAGE)


@pytest.mark.parametrize("exchange", exchanges("ventu/http-msgpack.json"))
def test_http_in_msgpack(clients, exchange):  # F108
    assert_as_recorded(exchange, sent(clients["msgpack"], exchange), page=PAGE)


@pytest.mark.parametrize("exchange", exchanges("ventu/jobs-json.json"))
def test_jobs_in_json(fronts, exchange):
    assert_as_recorded(exchange, answer_of(fronts["json"], exchange.request), page=PAGE)


@pytest.mark.parametrize("exchange", exchanges("ventu/jobs-msgpack.json"))
def test_jobs_in_msgpack(fronts, exchange):  # F108
    assert_as_recorded(exchange, answer_of(fronts["msgpack"], exchange.request), page=PAGE)
