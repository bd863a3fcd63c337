# SPDX-License-Identifier: Apache-2.0
"""Modules of handlers that come and go beside other threads."""

import itertools
import sys
import threading
import types

from forebay.surfaces.ovms.modules import HandlerFolder


def test_a_folder_is_forgotten_while_another_thread_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    is_over = threading.Event()

    def importing():
        for number in itertools.count():
            if is_over.is_set():
                return
            sys.modules[f"passing_{number}"] = types.ModuleType("passing")
            sys.modules.pop(f"passing_{number - 50}", None)

    thread = threading.Thread(target=importing)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(100):
            folder = HandlerFolder(tmp_path)
            assert folder.name in sys.modules
            folder.close()
            assert folder.name not in sys.modules
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(before)
