# SPDX-License-Identifier: Apache-2.0
"""Processes, threads, and how they end: section 5 of the specification, N60 and N155."""

import asyncio
import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from forebay.server.config import HttpConfig
from forebay.surfaces.contract import Options
from forebay.surfaces.nucleus.surface import NucleusSurface
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
            began = time.monotonic()
            if meet := query_params.get("meet"):
                Path(f"in-{meet}-{os.getpid()}-{threading.get_ident()}").touch()
                while len(list(Path.cwd().glob(f"in-{meet}-*"))) < int(query_params["of"]):
                    assert time.monotonic() < began + 60
                    time.sleep(0.01)
            return [os.getpid(), id(self), threading.get_ident(), began, time.monotonic()]
"""


@pytest.fixture(scope="module")
def three(serve):
    return serve(HANDLER, {"processes": 3})


@pytest.fixture(scope="module")
def two_by_two(serve):
    return serve(HANDLER, {"processes": 2, "threads_per_process": 2})


@pytest.fixture(scope="module")
def meet(parallel):
    """Sends requests that wait for each other in their handlers, `of` of them at a time."""

    def run(server, name, of, count=None):
        params = {"meet": name, "of": str(of)}
        return parallel(lambda _: server.request(params=params).json(), range(count or of))

    return run


def test_each_process_has_its_own_handler(three, meet):
    # N91
    assert len({pid for pid, *_ in meet(three, "each", 3)}) == 3


def test_constructors_do_not_overlap(three):
    # N92
    spans = sorted(tuple(map(float, path.read_text().split())) for path in three.folder.glob("opened-*"))
    assert len(spans) == 3
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(spans))


def test_capacity_is_processes_times_threads(two_by_two, meet):
    # N93
    for turn in ("first", "again"):
        results = meet(two_by_two, turn, 4, 5)
        assert len({(pid, handler) for pid, handler, *_ in results}) == 2
        assert len({(pid, thread) for pid, _, thread, *_ in results}) == 4
        assert max(began for *_, began, _ in results) >= min(ended for *_, ended in results), "the fifth waits"


def test_work_goes_to_the_process_with_fewer_requests(two_by_two, meet):
    # N91
    for turn in range(3):
        assert len({pid for pid, *_ in meet(two_by_two, f"fewer-{turn}", 2)}) == 2


def test_a_free_process_takes_what_waits(three, eventually):
    # N94
    def hold():
        return three.request(params={"meet": "held", "of": "3"}).json()

    with ThreadPoolExecutor() as threads:
        held = [threads.submit(hold) for _ in range(2)]
        eventually(lambda: len(list(three.folder.glob("in-held-*"))) == 2)
        assert len({three.request().json()[0] for _ in range(10)}) == 1  # the one that is free
        assert not any(one.done() for one in held)
        (three.folder / "in-held-last").touch()
        assert len({one.result()[0] for one in held}) == 2


def test_a_worker_that_dies_takes_the_server_down(serve, eventually):
    # N60
    server = serve(HANDLER, {"processes": 2})
    pid = server.request().json()[0]
    others = [int(path.name.split("-")[1]) for path in server.folder.glob("opened-*")]
    os.kill(pid, signal.SIGKILL)
    assert server.process.wait(PATIENCE_S) == 137
    assert not list(server.state.iterdir())
    for other in others:
        eventually(lambda other=other: not Path(f"/proc/{other}").exists())


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
    assert server.process.wait(PATIENCE_S) == 3
    assert (server.folder / "runs").read_text() == "run\n"


def test_a_callback_that_runs_at_sigterm_comes_to_its_end(serve, tmp_path, eventually):
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
    eventually((tmp_path / "begun").exists)
    assert server.stop() == 0
    assert (tmp_path / "ended").exists()
