# SPDX-License-Identifier: Apache-2.0
"""Processes, threads, and how they end: section 5 of the specification, N60 and N155."""

import asyncio
import itertools
import os
import signal
import time
from pathlib import Path

import pytest

from forebay.server.config import HttpConfig
from forebay.surfaces.contract import Options
from forebay.surfaces.nucleus import NucleusSurface
from forebay.types.call import ALONE

HANDLER = """
    import os, threading, time
    from pathlib import Path

    class Handler:
        def __init__(self, config):
            began = time.monotonic()
            time.sleep(0.2)
            Path(f"opened-{os.getpid()}").write_text(f"{began} {time.monotonic()}")
            self.count = 0

        def handle_get(self, query_params):
            self.count += 1
            if meet := query_params.get("meet"):
                Path(f"in-{meet}-{os.getpid()}-{threading.get_ident()}").touch()
                deadline = time.monotonic() + 60
                while len(list(Path.cwd().glob(f"in-{meet}-*"))) < 4:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            began = time.monotonic()
            time.sleep(float(query_params.get("sleep", 0)))
            return [os.getpid(), id(self), threading.get_ident(), began, time.monotonic()]
"""


@pytest.fixture(scope="module")
def three(serve):
    return serve(HANDLER, {"processes": 3})


@pytest.fixture(scope="module")
def two_by_two(serve):
    return serve(HANDLER, {"processes": 2, "threads_per_process": 2})


def timed(server, sleep_s):
    started = time.monotonic()
    found = server.request(params={"sleep": str(sleep_s)}).json()
    return time.monotonic() - started, found


def test_each_process_has_its_own_handler(three, parallel):
    # N91
    found = parallel(lambda _: timed(three, 0.4)[1], range(3))
    assert len({pid for pid, *_ in found}) == 3


def test_constructors_do_not_overlap(three):
    # N92
    spans = sorted(tuple(map(float, path.read_text().split())) for path in three.folder.glob("opened-*"))
    assert len(spans) == 3
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(spans))


def test_capacity_is_processes_times_threads(two_by_two, parallel):
    # N93
    for turn in ("first", "again"):
        asked = {"sleep": "0.3", "meet": turn}  # four wait for each other in their handlers
        results = parallel(lambda _: two_by_two.request(params=asked).json(), range(5))  # noqa: B023
        assert len({(pid, handler) for pid, handler, *_ in results}) == 2
        assert len({(pid, thread) for pid, _, thread, *_ in results}) == 4
        assert max(began for *_, began, _ in results) >= min(ended for *_, ended in results), "the fifth waits"


def test_work_goes_to_the_process_with_fewer_requests(two_by_two, parallel):
    # N91
    for _ in range(3):
        found = parallel(lambda _: timed(two_by_two, 0.15)[1][0], range(2))
        assert len(set(found)) == 2


def test_a_free_process_takes_what_waits(three, parallel):
    # N94
    with three.client() as other:
        slow = parallel(
            lambda job: job(),
            [
                lambda: timed(three, 0.8),
                lambda: timed(three, 0.8),
                lambda: [_seconds(other) for _ in range(10)],
            ],
        )
    assert min(slow[2]) < 0.3


def _seconds(client):
    started = time.monotonic()
    client.get("/", params={"sleep": "0.01"})
    return time.monotonic() - started


def test_a_worker_that_dies_takes_the_server_down(two_by_two, serve):
    # N60
    server = serve(HANDLER, {"processes": 2})
    pid = server.request().json()[0]
    others = [int(path.name.split("-")[1]) for path in server.folder.glob("opened-*")]
    os.kill(pid, signal.SIGKILL)
    assert server.process.wait(60) == 137
    assert not list(server.state.iterdir())
    for other in others:
        assert not Path(f"/proc/{other}").exists()


def test_projects_do_not_see_each_other(tmp_path):
    # N155: same file and module names, different contents, environment and working folder
    handler = """
    import os
    from pathlib import Path
    from model import NAME

    class Handler:
        def handle_get(self):
            return [NAME, os.environ["WHO"], Path("data.txt").read_text()]
    """
    options = Options(http=HttpConfig(), state_dir=tmp_path / "state")
    projects = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "nucleus.yaml").write_text(f"type: python\npath: handler.py\nenv:\n  WHO: {name}\n")
        (folder / "handler.py").write_text("\n".join(line[4:] for line in handler.splitlines()))
        (folder / "model.py").write_text(f"NAME = 'model of {name}'\n")
        (folder / "data.txt").write_text(f"data of {name}")
        projects.append(NucleusSurface().build(str(folder), options))

    async def run():
        await asyncio.gather(*(project.app.start() for project in projects))
        try:
            found = []
            for project in projects:
                endpoint = project.app.only.endpoint
                params = {"verb": "get", "query": b"", "headers": []}
                status, _, body = await endpoint.call(b"", params=params, key=ALONE)
                found.append((status, body))
            return found
        finally:
            await asyncio.gather(*(project.app.drain(1.0) for project in projects))

    found = asyncio.run(run())
    assert found == [(200, f'["model of {n}", "{n}", "data of {n}"]'.encode()) for n in ("a", "b")]


EFFECTS = """
    import os
    from pathlib import Path

    class Handler:
        def __init__(self):
            self.runs = Path("runs")

        def handle_post(self, payload):
            with self.runs.open("a") as runs:
                runs.write("run\\n")
            if payload != "live":
                os._exit(3)
            return payload

        def handle_get(self):
            return len(self.runs.read_text().splitlines()) if self.runs.exists() else 0
"""


@pytest.mark.parametrize("more", [{}, {"server_side_batching": {"max_batch_size": 2, "batch_interval_seconds": 0.01}}])
def test_what_lost_its_worker_is_answered_and_not_run_again(serve, more):
    # F39: a handler may have effects; the original answers 502 once and ends
    server = serve(EFFECTS, {"processes": 2, **more})
    answer = server.request("POST", json="die")
    assert answer.status_code == 502
    assert "not run again" in answer.text
    assert server.process.wait(60) == 3
    assert (server.folder / "runs").read_text() == "run\n"


def test_a_callback_that_runs_at_sigterm_comes_to_its_end(serve, tmp_path):
    # F40; N47, N60
    server = serve(
        """
        import pathlib, time

        class Handler:
            def handle_get(self, query_params):
                folder = pathlib.Path(query_params["folder"])

                def callback():
                    (folder / "begun").touch()
                    time.sleep(2)
                    (folder / "ended").touch()

                return 1, callback
        """
    )
    assert server.request(params={"folder": str(tmp_path)}).json() == 1
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    assert server.stop() == 0
    assert (tmp_path / "ended").exists()
