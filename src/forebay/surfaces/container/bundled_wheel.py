# SPDX-License-Identifier: Apache-2.0
"""A wheel of the forebay that runs here, for images: an index may not have what was installed from somewhere else."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import io
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

_PACKAGES: Final = ("forebay", "forebay_target")
_ABOUT: Final = frozenset({"METADATA", "WHEEL", "entry_points.txt"})


class BundledWheel(NamedTuple):
    """A wheel: its file's name, and what is in it."""

    name: str
    content: bytes


@functools.cache
def bundled_wheel() -> BundledWheel | None:
    """Return a wheel of the forebay that runs here; None if it came from an index, or is not installed.

    The same code makes the same wheel, bit for bit.
    """
    try:
        distribution = metadata.distribution("forebay")
    except metadata.PackageNotFoundError:
        return None
    if distribution.read_text("direct_url.json") is None:  # written for whatever comes from a folder, a file or a URL
        return None
    files = _code()
    for file in distribution.files or []:
        if file.parts[0].endswith(".dist-info") and (file.name in _ABOUT or "licenses" in file.parts):
            files[file.as_posix()] = Path(str(file.locate())).read_bytes()
    about = f"forebay-{distribution.version}.dist-info"
    files[f"{about}/RECORD"] = _record(files, about)
    tag = next(line for line in files[f"{about}/WHEEL"].decode().splitlines() if line.startswith("Tag: "))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name)  # of 1980, whenever it is made
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    return BundledWheel(f"forebay-{distribution.version}-{tag.removeprefix('Tag: ')}.whl", content.getvalue())


def _code() -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                files[path.relative_to(folder.parent).as_posix()] = path.read_bytes()
    return files


def _record(files: dict[str, bytes], about: str) -> bytes:
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in sorted(files.items())
    ]
    return "\n".join([*lines, f"{about}/RECORD,,", ""]).encode()
