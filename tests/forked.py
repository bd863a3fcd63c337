# SPDX-License-Identifier: Apache-2.0
"""Starts `forebay` as a process that need not import it: one that did forks it. The rest is as with `subprocess`.

Hundreds of tests start a command or a server, and most of what such a process does is to import. So each process that
runs tests has another one, which has imported what all commands need, and forks twice for each start: as what stands
between them ends at once, the kernel makes the new process a child of the one that asked (it is their subreaper then).
Where there are no subreapers, as on macOS, each starts from its beginning.
"""

import atexit
import ctypes
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading

COMMAND = [sys.executable, "-c", "import sys; from forebay.cli.main import main; sys.exit(main())"]

_PR_SET_CHILD_SUBREAPER = 36
_CAN_ADOPT = hasattr(ctypes.CDLL(None), "prctl")
_HEADER_BYTES = 8
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SOURCE = """
import gc, importlib, os, pickle, signal, socket, sys

import uvloop
from forebay.cli.main import main
for name in (
    "analyse batching bench call_model check generate init nucleus ovms pipeline serve trace worker"
).split():
    importlib.import_module(f"forebay.cli.{name}")
# What every server imports, whatever it serves.
for name in (
    "transports.http.listener transports.grpc.listener transports.http.asgi transports.server server.app "
    "server.setting_sources observe.traces.otel surfaces.project_server surfaces.native.config surfaces.native.pools "
    "surfaces.native.describe surfaces.native.compositions surfaces.native.servings surfaces.native.repositories "
    "serving.models.model_runner serving.nx_serving.request_runner workers.pools.threads workers.pools.process_pool"
).split():
    importlib.import_module(f"forebay.{name}")
import uvicorn.lifespan.off, yaml, encodings.idna
gc.collect()
gc.freeze()


def asked():
    global arguments
    with socket.socket(fileno=int(sys.argv[1])) as asking:
        while True:
            header, files, _, _ = socket.recv_fds(asking, 8, 3)
            if not header:
                os._exit(0)
            wanted, length = b"", int.from_bytes(header)
            while len(wanted) < length:
                wanted += asking.recv(length - len(wanted))
            told, tell = os.pipe()
            between = os.fork()
            if between == 0:
                pid = os.fork()
                if pid:
                    os.write(tell, pid.to_bytes(8))
                    os._exit(0)
                break
            os.waitpid(between, 0)
            os.close(tell)
            pid = os.read(told, 8)
            for one in (told, *files):
                os.close(one)
            asking.sendall(pid)
    arguments, folder, env, ignored = pickle.loads(wanted)
    for number, one in enumerate(files):
        os.dup2(one, number)
    os.closerange(3, 65536)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else usual)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)


asked()
sys.argv = ["-c", *arguments]
del arguments
sys.exit(main())
"""


class _Forking:
    """The process that forks the others; it ends when nobody can ask it any more."""

    def __init__(self):
        self.environment = _of_python(os.environ)
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _SOURCE, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        self._lock = threading.Lock()
        atexit.register(self._end)

    def _end(self):
        self._socket.close()
        self._process.wait()

    def start(self, wanted, files):
        """Returns the new process; it is a child of this one."""
        message = pickle.dumps(wanted)
        with self._lock:
            _adopt(True)
            try:
                socket.send_fds(self._socket, [len(message).to_bytes(_HEADER_BYTES)], files)
                self._socket.sendall(message)
                pid = self._socket.recv(_HEADER_BYTES, socket.MSG_WAITALL)
            finally:
                _adopt(False)
        assert len(pid) == _HEADER_BYTES, "what forks the commands has ended"
        return int.from_bytes(pid)


def _adopt(is_wanted):
    """Be the parent of what loses its own, below this process, or not any more."""
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0) == 0


def _of_python(env):
    """What an interpreter heeds as it starts."""
    return {name: value for name, value in env.items() if name.startswith(("PYTHON", "LC_", "LANG"))}


_EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # pyright: ignore[reportAttributeAccessIssue]
_starting = threading.Lock()
_forking = None


class Forked(subprocess.Popen):
    """What `subprocess.Popen` is for a command that begins with `COMMAND`."""

    def _execute_child(self, *given):
        told = _EXECUTE.bind(self, *given).arguments
        env = os.environ if told["env"] is None else told["env"]
        forking = _forking_process() if _CAN_ADOPT else None
        if forking is None or _of_python(env) != forking.environment:
            super()._execute_child(*given)  # pyright: ignore[reportAttributeAccessIssue]
            return
        ignored = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
        ends = [told[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        files = [end if end != -1 else number for number, end in enumerate((ends[0], ends[3], ends[5]))]
        try:
            arguments = [str(argument) for argument in told["args"][len(COMMAND) :]]
            folder = os.getcwd() if told["cwd"] is None else str(told["cwd"])  # noqa: PTH109 - it is sent
            self.pid = forking.start((arguments, folder, dict(env), ignored), files)
            self._child_created = True
        finally:
            self._close_pipe_fds(*ends)  # pyright: ignore[reportAttributeAccessIssue]


def _forking_process():
    global _forking  # noqa: PLW0603 - one for each process that runs tests
    with _starting:
        if _forking is None:
            _forking = _Forking()
        return _forking
