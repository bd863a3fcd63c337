# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false
"""Runners behind `PackedRunner`; worker processes import this module by name."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from forebay.errors import InvalidRequest
from forebay.serving.models.model import load_module
from forebay.types.call import After, Failure
from forebay.workers.runner import Runner
from forebay.workers.wire.objects import Outputs


class Doing(Runner):
    """Does with each item what its input `do` says; `path` is a file of the user's to load."""

    def __init__(self, path=None):
        self.path = path
        self.kept = []
        self.module = None

    def open(self, ctx):
        if self.path:
            self.module = load_module(Path(self.path))

    def run(self, items):
        return [self.one(item) for item in items]

    def one(self, item):
        if isinstance(item.body, list):
            if "few" in item.body[0]:
                return item.body[1:]
            return [self.do(**sample) for sample in item.body]
        return self.do(**item.body)

    def do(self, do="echo", x=None, **others):
        return getattr(self, "do_" + do)(x, **others)

    def do_echo(self, x):
        return x

    def do_names(self, x, **others):
        return sorted(others)

    def do_double_in_place(self, x):
        x *= 2
        return x

    def do_keep(self, x):
        self.kept.append(x)
        return [int(kept[0]) for kept in self.kept]

    def do_kind(self, x):
        return f"{type(x).__module__}.{type(x).__name__}"

    def do_point(self, x):
        return self.module.Point(*x)

    def do_ports(self, x):
        return Outputs({"left": x, "right": [x, x]})

    def do_nothing(self, x):
        return Outputs({})

    def do_lock(self, x):
        return {"lock": threading.Lock()}

    def do_lock_on_a_port(self, x):
        return Outputs({"fine": 1, "locked": threading.Lock()})

    def do_fail(self, x):
        return Failure(InvalidRequest("no"))

    def do_after(self, x):
        return After(x, lambda: None)

    def do_raise(self, x):
        raise ValueError(x)

    def do_die(self, x):
        os.kill(os.getpid(), signal.SIGKILL)

    def do_pid(self, x):
        return os.getpid()
