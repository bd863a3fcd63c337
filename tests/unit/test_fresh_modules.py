# SPDX-License-Identifier: Apache-2.0
"""Files of a project that are imported once more while others are."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from tests.waiting import PATIENCE_S, eventually

from forebay.serving.models.model import load_module, models_in
from forebay.surfaces.native import fresh_modules

FILE = """
import forebay
import gate

gate.entered.set()
assert gate.open.wait(gate.patience_s)


class Doubled(forebay.Model):
    def predict(self, batch: list[int]) -> list[int]:
        return [2 * number for number in batch]
"""


def test_threads_that_read_a_file_anew_take_turns(tmp_path, monkeypatch):
    gate = SimpleNamespace(entered=threading.Event(), open=threading.Event(), patience_s=PATIENCE_S)
    monkeypatch.setitem(sys.modules, "gate", gate)
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "one.py"
    file.write_text(FILE)

    def read(limit_s=PATIENCE_S):
        with fresh_modules.fresh_modules([tmp_path], limit_s):
            return [model.__name__ for model in models_in(load_module(file))]

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(read)
        assert gate.entered.wait(PATIENCE_S)
        second = threads.submit(read)
        waiting: Any = fresh_modules._turns._over
        eventually(lambda: second.done() or waiting._waiters)
        gate.open.set()
        assert first.result(PATIENCE_S) == second.result(PATIENCE_S) == ["Doubled"]
        # One that hangs is not waited for once its time is over.
        gate.open.clear()
        gate.entered.clear()
        hangs = threads.submit(read, 0.0)
        assert gate.entered.wait(PATIENCE_S)
        with fresh_modules.fresh_modules([tmp_path / "other"], PATIENCE_S):
            assert not hangs.done()
            with fresh_modules.fresh_modules([tmp_path / "other"], PATIENCE_S):
                gate.open.set()
        assert hangs.result(PATIENCE_S) == ["Doubled"]
