# SPDX-License-Identifier: Apache-2.0
"""Records what programs of a version say to each other: `python -m tests.mixed.record COMMIT` writes previous.json."""

import argparse
import base64
import json
import socket
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.mixed.versions import CALLS, Version, unpacked, used_cache, with_front, with_worker

PAGE = Path(__file__).with_name("previous.json")


class Tap:
    """A relay that notes the frames of each connection, with who said them."""

    def __init__(self, path, beyond, dialling, listening):
        self.conversations = []
        self._beyond = beyond
        self._names = dialling, listening
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._beyond)
                said = []
                self.conversations.append(said)
                for name, source, target in zip(self._names, (near, far), (far, near), strict=True):
                    threading.Thread(target=pump, args=(name, source, target, said), daemon=True).start()


def pump(name, source, target, said):
    """Forwards whole frames, which are in the order of their arrival then."""
    with suppress(OSError), source.makefile("rb") as reader:
        while header := reader.read(4):
            payload = reader.read(int.from_bytes(header, "big"))
            said.append([name, base64.b64encode(payload).decode()])
            target.sendall(header + payload)
        target.shutdown(socket.SHUT_WR)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    commit = parser.parse_args().commit
    with tempfile.TemporaryDirectory() as made:
        version = unpacked(commit, Path(made))
        with ExitStack() as stack:
            workers = Tap(f"{made}/workers", f"{made}/door", "worker", "server")
            programs = Version(version, stack)
            answered = with_worker(programs, programs, f"unix:{made}/door", CALLS, f"unix:{made}/workers")
        with ExitStack() as stack:
            fronts = Tap(f"{made}/fronts", f"{made}/owner", "front", "owner")
            programs = Version(version, stack)
            assert with_front(programs, programs, f"unix:{made}/owner", CALLS, f"unix:{made}/fronts") == answered
        with ExitStack() as stack:
            used_cache(Version(version, stack), Path(made), Path(made, "cache"))
            files = [path for path in Path(made, "cache").rglob("*") if path.is_file()]
            cache = {str(path.relative_to(f"{made}/cache")): path.read_text() for path in files}
    told = {
        "commit": commit,
        "calls": [[*call, *answer] for call, answer in zip(CALLS, answered, strict=True)],
        "workers": workers.conversations,
        "fronts": fronts.conversations,
        "cache": cache,
    }
    PAGE.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
