# SPDX-License-Identifier: Apache-2.0
"""Projects that `forebay generate` reads, and what it writes for them."""

import contextlib
import io
import subprocess
from typing import Any

from forebay.cli.main import main


def generate(folder, *arguments):
    """Generates in this process, which has imported all of it already."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(["generate", *map(str, arguments)])
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def lay(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        made: Any = content() if callable(content) else content
        (folder / name).write_bytes(made if isinstance(made, bytes) else made.encode())
    return folder
