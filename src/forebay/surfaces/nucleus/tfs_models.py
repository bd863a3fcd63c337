# SPDX-License-Identifier: Apache-2.0
"""What TensorFlow Serving is to have loaded: the models that workers use, told to it as a whole whenever that changes.

It finds them through a folder that both see: `FOLDER/NAME/VERSION`, each a link to where that version lies.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.remote_servers.tfserving import TfServingCalls

if TYPE_CHECKING:
    from forebay.remote_servers.servers import ServerAddress
    from forebay.repository.listing import Revision

RELOAD_S = 300.0
"""Time that loading may take."""


class TfsModels:
    """Keeps a server's models as they should be; for several threads."""

    def __init__(self, address: ServerAddress, folder: Path) -> None:
        """Tell a server of the links in a folder; raises ConfigError if grpcio is not installed."""
        self._calls = TfServingCalls(address, RELOAD_S)
        self._folder = folder
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}
        self._there: dict[tuple[str, str], tuple[str, Path]] = {}
        shutil.rmtree(folder, ignore_errors=True)

    def add(self, revision: Revision, folder: Path) -> None:
        """Have a revision loaded, in place of another one of the same version; returns once it is.

        Raises:
            ForebayError: If that fails; it is as before then.
        """
        with self._lock:
            key = (revision.model, revision.version)
            before = self._there.get(key)
            if before is None or before[0] != revision.id:
                self._put(key, None)
                if before is not None:
                    self._tell()  # the same version with other files would not be loaded anew
                self._put(key, (revision.id, folder))
                try:
                    self._tell()
                except BaseException:
                    self._put(key, before)
                    raise
            self._used[revision.id] = self._used.get(revision.id, 0) + 1

    def drop(self, id: str) -> None:
        """Have a revision unloaded once nobody uses it any more.

        Raises:
            ForebayError: If nobody can be told; it is as it should be when the next one is.
        """
        with self._lock:
            left = self._used.get(id, 0) - 1
            if left > 0:
                self._used[id] = left
                return
            self._used.pop(id, None)
            for key in [key for key, (other, _) in self._there.items() if other == id]:
                self._put(key, None)
                self._tell()

    def restore(self) -> None:
        """Tell it again, for it may have been started anew.

        Raises:
            ForebayError: If it cannot be told, or cannot load them.
        """
        with self._lock:
            self._tell()

    def close(self) -> None:
        """Hang up."""
        self._calls.close()

    def _put(self, key: tuple[str, str], there: tuple[str, Path] | None) -> None:
        """Let the link of a version lead to a folder, or nowhere."""
        model, version = key
        link = self._folder / model / version
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        self._there.pop(key, None)
        if there is None:
            with contextlib.suppress(OSError):  # there are other versions
                link.parent.rmdir()
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(there[1])
        self._there[key] = there

    def _tell(self) -> None:
        versions: dict[str, list[int]] = {}
        for model, version in self._there:
            versions.setdefault(model, []).append(int(version))
        self._calls.reload({model: (str(self._folder / model), found) for model, found in versions.items()})
