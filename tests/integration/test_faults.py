# SPDX-License-Identifier: Apache-2.0
"""Faults in a server's own surroundings: it is killed, starved and left without its files; nothing hangs or is left."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.ports import free_port
from tests.processes import kill_if_noted
from tests.waiting import PATIENCE_S

from forebay.transports.signals import LAST_S

PROCESS = "--worker-kind", "process"


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def stubborn(serve, tmp_path):
    """Serves a model of `stubborn.py`, whose files lie in a folder of the test's."""

    def start(name, *options, **more):
        env = {"FOREBAY_TEST_FOLDER": str(tmp_path), **more.pop("env", {})}
        return serve(f"stubborn.py:{name}", *options, env=env, **more)

    yield start
    for found in tmp_path.glob("*.[0-9]*"):  # what a failed test leaves
        kill_if_noted(int(found.suffix[1:]), found.stat().st_mtime)


def at(folder, stage):
    """The processes that have come to a stage."""
    return {int(found.suffix[1:]) for found in folder.glob(f"{stage}.*")}


def asked(server, body=b"1"):
    """A connection with a request on its way."""
    wire = server.connect()
    return wire.send(wire.request("POST", "/", body))


# Killed

HELD = """
import os, sys, time
from pathlib import Path

FOLDER = Path(os.environ["FOREBAY_TEST_FOLDER"])

def hold(stage):
    (FOLDER / f"{stage}.{os.getpid()}").touch()
    while (FOLDER / "hold").exists():
        time.sleep(0.005)

if "forebay.workers.processes.child" in sys.orig_argv and (FOLDER / "starting").exists():
    number = sys.orig_argv[sys.orig_argv.index("--worker") + 1]
    if number == "0":
        hold("starting")
    elif number == "1":
        from forebay.workers.processes import parent_death
        end_with = parent_death.end_with
        parent_death.end_with = lambda server: (end_with(server), hold("greeting"))
"""
"""Runs in each process as Python starts: the first worker is held at once, the second before it says hello."""

STAGES = {
    "importing": {"importing"},  # in a process that tells the server what is in the file
    "starting": {"starting", "greeting", "loading"},  # of three workers each is somewhere else
    "serving": {"serving"},
    "draining": {"serving"},
}


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_left_of_a_server_that_is_killed(stubborn, tmp_path, eventually, stage):
    # F23
    is_up = stage in {"serving", "draining"}
    for name in (stage, "temporary", *([] if is_up else ["hold"])):
        (tmp_path / name).mkdir()
    (tmp_path / "sitecustomize.py").write_text(HELD)
    port = free_port()
    more = {"importing": ["--python", sys.executable], "starting": ["--workers", "3"]}.get(stage, [])
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "TMPDIR": str(tmp_path / "temporary")}
    server = stubborn("Stubborn", *PROCESS, *more, ready=is_up, port=port, env=env)
    wire = asked(server) if is_up else None
    eventually(lambda: all(at(tmp_path, where) for where in STAGES[stage]))
    if stage == "draining":
        server.signal()
        eventually(lambda: "draining" in server.log)
    server.signal(signal.SIGKILL)
    server.process.wait()
    if wire is not None:
        wire.socket.close()
    for where in STAGES[stage] - {"starting"}:
        for pid in at(tmp_path, where):
            eventually(lambda pid=pid: not is_running(pid), f"the end of process {pid}, {where}")
    if stage == "starting":  # this worker is on no leash yet: it finds out as soon as it goes on
        (tmp_path / "hold").rmdir()
        (pid,) = at(tmp_path, "starting")
        eventually(lambda: not is_running(pid), f"the end of process {pid}")
    server.wait()
    assert "Traceback" not in server.log
    assert [*Path("/dev/shm").glob(f"forebay-{server.process.pid}-*"), *(tmp_path / "temporary").iterdir()] == []
    socket.create_server(("127.0.0.1", port)).close()


def test_what_only_describes_a_file_ends_with_a_server_that_ended_before_it_looked(tmp_path):
    # F23
    (tmp_path / "model.py").write_text("import time\ntime.sleep(600)\n")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-P", "-c", "from forebay.surfaces.native.describe import main; main()"]
    with subprocess.Popen([*command, tmp_path / "model.py", str(gone.pid)], stdout=subprocess.PIPE) as describing:
        try:
            assert describing.stdout is not None
            describing.stdout.close()
            describing.wait(PATIENCE_S)
        finally:
            describing.kill()


def test_no_process_outlives_a_program_with_a_serving_that_is_killed(tmp_path, eventually):
    # F23
    script = tmp_path / "script.py"
    script.write_text(
        "import ctypes, threading\nimport numpy as np\nfrom forebay import Batch, Serving\n"
        "def load(options):\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"
        "    return lambda batch: ctypes.PyDLL(None).sleep(600)\n"
        "serving = Serving.new(load)\n"
        "if __name__ == '__main__':\n"
        "    started = []\n"
        "    thread = threading.Thread(target=lambda: started.append(serving.start(worker_kind='process')))\n"
        "    thread.start(), thread.join()\n"
        "    print(started[0]._partitions.pool.pids()[0], flush=True)\n"
        "    started[0].batched_run(Batch.concatenate([np.array([1])]))\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        assert is_running(pid)
        program.kill()
    eventually(lambda: not is_running(pid), "the end of the partition")


def test_what_a_model_forks_keeps_neither_the_port_nor_a_connection(stubborn, tmp_path, eventually):
    server = stubborn("Forking", "--worker-kind", "thread", port=free_port())
    with server.connect() as wire:
        assert wire.ask("POST", "/", b"1").status == 200
        (child,) = eventually(lambda: at(tmp_path, "forked"))
        server.signal()
        assert wire.read_rest() == b""
        eventually(lambda: server.process.poll() is not None)
        socket.create_server(("127.0.0.1", server.port)).close()
        assert is_running(child)
    os.kill(child, signal.SIGTERM)
    eventually(lambda: not is_running(child), "the end of what was forked")


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_what_a_model_forks_ends_when_it_is_terminated(stubborn, kind):
    server = stubborn("Terminating", "--worker-kind", kind, "--timeout-ms", "60000")
    assert server.client.post("/", json=-1).json() == 1


# Told to end


def test_neither_a_thread_that_never_ends_nor_a_load_that_blocks_the_loop_keeps_the_server(
    stubborn, tmp_path, eventually
):
    # F25; both at once, for both take the time that a server has to end
    threaded = stubborn("Threaded", "--worker-kind", "inline", "--drain-s", "0.1")
    assert threaded.client.post("/", json=1).json() == 1
    (tmp_path / "hold").touch()
    loading = stubborn("Stubborn", "--worker-kind", "inline", ready=False)
    eventually(lambda: at(tmp_path, "loading"))
    threaded.signal()
    loading.signal()
    assert threaded.wait(LAST_S + 10) == 0
    assert loading.wait(LAST_S + 10) == 0
    assert "did not end in time" in threaded.log


def test_a_second_signal_ends_a_server_whose_thread_never_ends(stubborn, eventually):
    # F25
    server = stubborn("Threaded", "--worker-kind", "inline")
    assert server.client.post("/", json=1).json() == 1
    server.signal()
    eventually(lambda: "draining" in server.log)
    server.signal()
    server.signal(signal.SIGINT)
    assert server.wait(LAST_S + 10) in {0, 1, -signal.SIGTERM, -signal.SIGINT}


@contextmanager
def heeded(*numbers):
    """What is started meanwhile gets these signals, though the suite may run under nohup or in the background."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_what_is_in_flight_is_answered_and_the_exit_status_is_0(serve, tmp_path, eventually):
    # F25; SIGTERM: test_lifecycle; SIGHUP: test_reload
    number = signal.SIGINT
    (tmp_path / "model.py").write_text(
        "import os, pathlib, time, forebay\n\n"
        "class Waits(forebay.Model):\n    def predict(self, batch: list[str]) -> list[int]:\n"
        "        while not pathlib.Path(batch[0]).exists():\n            time.sleep(0.005)\n"
        "        return [os.getpid()] * len(batch)\n"
    )
    with heeded(number):
        server = serve(tmp_path / "model.py", *PROCESS)
    with server.connect() as wire:
        worker = wire.ask("POST", "/", json.dumps(str(tmp_path)).encode()).json()
        wire.send(wire.request("POST", "/", json.dumps(str(tmp_path / "go")).encode()))
        eventually(lambda: server.metric("forebay_in_flight") == 1)
        server.signal(number)
        os.kill(worker, number)  # a terminal tells the whole group
        eventually(lambda: "draining" in server.log)
        (tmp_path / "go").touch()
        answer = wire.read()
        assert (answer.status, answer.json()) == (200, worker)
        assert wire.is_closed_by_server()
    assert server.wait() == 0
    assert "Traceback" not in server.log


def test_ctrl_c_while_the_file_is_imported_ends_the_command(serve, tmp_path, eventually):
    (tmp_path / "model.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('importing').touch()\ntime.sleep(600)\n"
    )
    with heeded(signal.SIGINT):
        server = serve(tmp_path / "model.py", ready=False)
    eventually((tmp_path / "importing").exists)
    server.signal(signal.SIGINT)
    assert server.wait() == 130
    assert "Traceback" not in server.log


def test_a_model_that_does_not_unload_does_not_keep_others_from_it(serve, tmp_path):
    # F26
    (tmp_path / "models.py").write_text(
        "import pathlib, forebay\n\n"
        "class Unwilling(forebay.Model):\n    def predict(self, batch):\n        return batch\n\n"
        "    def unload(self):\n        raise RuntimeError('it does not want to go')\n\n"
        "class Willing(forebay.Model):\n    def predict(self, batch):\n        return batch\n\n"
        f"    def unload(self):\n        pathlib.Path({str(tmp_path / 'unloaded')!r}).touch()\n"
    )
    server = serve(tmp_path / "models.py", "--worker-kind", "inline")
    server.signal()
    assert server.wait() == 0
    assert (tmp_path / "unloaded").exists()
    assert "it does not want to go" in server.log


# Starved


@pytest.fixture(scope="module")
def starving(launch):
    """A server that these tests starve, one after the other; its option tells it from everybody else's."""
    return launch("single.py", *PROCESS, "--max-body-bytes", str(1 << 28))


def test_too_many_open_files_are_told_and_are_over_when_they_are(starving, eventually):
    # F19
    server = starving
    wire = server.connect()
    pid = server.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    worker = wire.ask("POST", "/", b"0").json()[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(list(Path(f"/proc/{pid}/fd").iterdir())) - 3, limits[1]))
    os.kill(worker, signal.SIGKILL)
    answer = eventually(lambda: (found := wire.ask("POST", "/", b"0")).status == 503 and found, "a refusal")
    assert "worker 0 cannot be started: Too many open files" in answer.error["message"]
    assert "Too many open files" in wire.ask("GET", "/readyz").json()["problems"][0]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    eventually(lambda: wire.ask("GET", "/readyz").status == 200)
    assert wire.ask("POST", "/", b"0").status == 200
    wire.socket.close()


def size_of(pid):
    """Bytes of address space."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def test_a_body_for_which_there_is_no_memory_is_refused_alone(starving):
    server, pid = starving, starving.process.pid
    with server.connect() as wire, server.connect() as other:
        assert other.ask("POST", "/", b"0").status == 200
        resource.prlimit(pid, resource.RLIMIT_AS, (size_of(pid) + (24 << 20), resource.RLIM_INFINITY))
        with suppress(ConnectionError):
            wire.send(wire.request("POST", "/", b"1" * (100 << 20)))
        with suppress(ConnectionError, EOFError):
            assert wire.read().status in {500, 503}
        assert other.ask("POST", "/", b"0").status == 200
    resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with server.connect() as wire:
        assert wire.ask("POST", "/", b"0").status == 200


def test_a_worker_without_memory_or_room_for_files_costs_that_request_only(starving):
    server = starving
    with server.connect() as wire:
        pid, worker = server.process.pid, wire.ask("POST", "/", b"0").json()[1]
        body = b" " * (8 << 20) + b"0"
        for process in (pid, worker):  # as if /dev/shm were full: what is large goes another way
            resource.prlimit(process, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        assert wire.ask("POST", "/", body).json()[1] == worker
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        resource.prlimit(worker, resource.RLIMIT_AS, (size_of(worker) + (4 << 20), resource.RLIM_INFINITY))
        answer = wire.ask("POST", "/", body)
        assert answer.status in {200, 500, 503}, answer.body
        assert wire.ask("POST", "/", b"0").status == 200


def test_a_model_that_gives_up_the_right_to_open_files_is_sent_long_bodies_all_the_same(serve, tmp_path):
    (tmp_path / "model.py").write_text(
        "import os, resource\nimport forebay\n\n"
        "class Confined(forebay.Model):\n"
        "    def load(self):\n"
        "        resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n\n"
        "    def predict(self, batch: list[str]) -> list[str]:\n"
        "        return [f'{os.getpid()} {one}' for one in batch]\n"
    )
    server = serve(tmp_path / "model.py", *PROCESS)
    worker, _ = server.call("confined", "x").json().split()
    for length in (100_000, 300_000, 3_000_000):
        assert server.call("confined", "x" * length).json() == f"{worker} {'x' * length}"


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_standard_files_that_are_closed_are_missed_by_nobody(closed, models, tmp_path, eventually):
    # F26
    port = free_port()
    closing = " ".join(f"{number}>&-" for number in closed)
    run = "import sys; from forebay.cli.main import main; sys.exit(main())"
    served = f'serve "{models}/single.py" {" ".join(PROCESS)} --http-port {port}'
    process = subprocess.Popen(["sh", "-c", f'exec "{sys.executable}" -c "{run}" {served} {closing}'])
    try:

        def connected():
            with suppress(OSError):
                return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
            return None

        with eventually(connected) as connection:
            connection.settimeout(PATIENCE_S)
            while True:
                connection.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n0")
                answer = connection.recv(65536)
                if b" 503 " not in answer.split(b"\r\n")[0]:
                    break
            assert answer.startswith(b"HTTP/1.1 200 ")
        links = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in closed]
        assert set(links) == {"/dev/null"}
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def test_a_full_disk_behind_the_log_costs_the_log_only(models, eventually):
    port = free_port()
    with Path("/dev/full").open("wb") as full:
        run = "import sys; from forebay.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", run, "serve", models / "single.py", "--worker-kind", "thread"]
        process = subprocess.Popen([*command, "--http-port", str(port), "--access-log"], stdout=full, stderr=full)
    try:

        def answered():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
                connection.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n0")
                return connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            return False

        eventually(answered)
        process.terminate()
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()


def test_a_log_that_nobody_reads_costs_the_log_only(models, eventually):
    port = free_port()
    read, write = os.pipe()
    run = "import sys; from forebay.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", run, "serve", models / "single.py"]
    process = subprocess.Popen([*command, "--http-port", str(port), "--access-log"], stdout=write, stderr=write)
    os.close(write)
    try:

        def is_answered():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
                connection.sendall(b"GET /%s HTTP/1.1\r\nhost: localhost\r\n\r\n" % (b"x" * 30_000))
                return connection.recv(65536).startswith(b"HTTP/1.1 404 ")
            return False

        eventually(is_answered)
        for _ in range(4):  # the line of each is half of what a pipe takes
            assert is_answered()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(read)


# Misled


def test_a_file_that_changes_the_working_folder_is_found_by_its_workers(serve, tmp_path, monkeypatch):
    # F26
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "graph.py").write_text(
        "import os, forebay\nfrom forebay import compose, node\n\n"
        f"os.chdir({str(tmp_path / 'elsewhere')!r})\n\n"
        "@node(worker_kind='process')\n"
        "def twice(x: int) -> int:\n    return 2 * x\n\n"
        "@compose\ndef chain(x: int) -> int:\n    return twice(x)\n"
    )
    server = serve(None, "graph.py")
    assert server.call("chain", 2).json() == 4


PARALLEL = """
import atexit, threading
from forebay import Model

class Parallel(Model):
    def load(self):
        self.told, self.ended = threading.Event(), threading.Event()
        threading.Thread(target=self.manage, daemon=True).start()
        atexit.register(self.ended.wait)
        threading._register_atexit(self.told.set)

    def manage(self):
        self.told.wait()
        self.ended.set()

    def predict(self, batch):
        return batch
"""


def test_an_executor_is_told_to_end_before_its_processes_are_waited_for(serve, tmp_path):
    """As joblib's, which has a daemon thread: the server took as long as a drain may, and left its processes behind."""
    (tmp_path / "parallel.py").write_text(PARALLEL)
    server = serve(str(tmp_path / "parallel.py"), "--worker-kind", "thread")
    server.signal()
    assert server.wait() == 0
    assert "did not end in time" not in server.log


EXECUTING = """
import time
from concurrent.futures import ThreadPoolExecutor
from forebay import Model

class Executing(Model):
    def load(self):
        self.pool = ThreadPoolExecutor(1)

    def predict(self, batch):
        self.pool.submit(time.sleep, 3600)
        return batch
"""


def test_an_executor_whose_thread_hangs_does_not_keep_the_server(serve, tmp_path):
    (tmp_path / "executing.py").write_text(EXECUTING)
    server = serve(str(tmp_path / "executing.py"), "--worker-kind", "thread")
    assert server.call("executing", 1).json() == 1
    server.signal()
    assert server.wait() == 0
    assert "did not end in time" not in server.log
