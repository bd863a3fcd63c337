# SPDX-License-Identifier: Apache-2.0
"""Takes away from this interpreter what CPython has on Linux and not on macOS: `PYTHONPATH=tests/portable`.

Python imports this before anything else. It makes no Mac of a Linux: what libraries in C do stays as it is, uvloop's
epoll above all. But code fails that uses a name of Linux without a look whether it is there.
"""

import builtins
import ctypes
import errno
import importlib
import io
import os
import termios

_PREFIXES = {  # `select` before `socket`, whose import looks at it
    "fcntl": ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_", "F_GETPIPE_SZ", "F_SETPIPE_SZ"),
    "mmap": ("MADV_REMOVE", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MAP_POPULATE", "MAP_STACK"),
    "os": (
        *("sched_", "O_PATH", "O_TMPFILE", "pidfd_", "memfd_", "MFD_", "posix_fa", "eventfd", "copy_file_range"),
        *("splice", "setns", "unshare", "waitid", "getrandom", "timerfd_"),
    ),
    "select": ("epoll", "EPOLL", "POLLRDHUP"),
    "signal": ("pidfd_", "sigtimedwait", "sigwaitinfo"),
    "socket": ("SO_PEERCRED", "SO_PASSCRED", "TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_QUICKACK"),
}
for _module_name, _names in _PREFIXES.items():
    _module = importlib.import_module(_module_name)
    for _name in [one for one in dir(_module) if one.startswith(_names) and one != "sched_yield"]:
        delattr(_module, _name)

if hasattr(os, "process_cpu_count"):
    setattr(os, "process_cpu_count", os.cpu_count)  # noqa: B010 - as where there is no `sched_getaffinity`
setattr(termios, "TIOCOUTQ", 0x40047473)  # noqa: B010 - its number there, which means nothing here

_HIDDEN = ("/proc", "/sys", "/dev/shm")
_MAX_PATH_BYTES = 103


def _refuse_hidden(path):
    if isinstance(path, str | bytes | os.PathLike):
        text = os.fsdecode(path)
        if text in _HIDDEN or text.startswith(tuple(f"{one}/" for one in _HIDDEN)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)


def _hide(module, name):
    usual = getattr(module, name)

    def seeing(path=".", *rest, **more):
        _refuse_hidden(path)
        return usual(path, *rest, **more)

    setattr(module, name, seeing)
    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if usual in known:
            known.add(seeing)


def _access(path, mode, **more):
    try:
        _refuse_hidden(path)
    except FileNotFoundError:
        return False
    return _usual_access(path, mode, **more)


for _name in ("open", "stat", "lstat", "listdir", "scandir", "readlink"):
    _hide(os, _name)
_hide(io, "open")
builtins.open = io.open
_usual_access, os.access = os.access, _access


def _shorter(usual):
    def called(self, address):
        if isinstance(address, str | bytes) and len(os.fsencode(address)) > _MAX_PATH_BYTES:
            raise OSError("AF_UNIX path too long")
        return usual(self, address)

    return called


_Socket = importlib.import_module("socket").socket
for _name in ("bind", "connect", "connect_ex"):
    setattr(_Socket, _name, _shorter(getattr(_Socket, _name)))

_usual_function = ctypes.CDLL.__getattr__


def _function(self, name):
    if name in {"prctl", "mallopt"}:
        raise AttributeError(name)
    return _usual_function(self, name)


ctypes.CDLL.__getattr__ = _function
