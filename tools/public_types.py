# SPDX-License-Identifier: Apache-2.0
"""Checks that type checkers of users know the types of all public names, as `make check` does."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEADS_INSIDE = {
    "forebay.asgi",
    "forebay.testing.AsyncClient",
    "forebay.testing.Client",
    "forebay.testing.client",
}
"""Names that lead to classes which nobody outside uses, with attributes whose types are inferred."""
PUBLIC = re.compile(r"forebay\.(?:(?:cluster|openai|runtimes|testing)\.)?\w+$")


def main() -> int:
    """Return 1 if the type of a public name, or of what it has, is unknown or has to be inferred."""
    beside = Path(sys.executable).parent  # it asks the `python` that it finds for the package
    environment = {**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "basedpyright", "--verifytypes", "forebay", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)["typeCompleteness"]
    symbols = [one for one in told["symbols"] if one["isExported"]]
    found = [one["name"] for one in symbols if not one["isTypeKnown"] and PUBLIC.match(one["name"])]
    unknown = sorted({name for name in found if is_public(name)} - LEADS_INSIDE)
    print(f"{len(symbols)} symbols, {told['completenessScore']:.0%} with declared types")
    if not symbols:
        print(f"basedpyright does not find forebay by the python in {beside}; run: make setup")
        return 1
    if unknown:
        print(f"not all types are declared of {', '.join(unknown)}; ask: basedpyright --verifytypes forebay")
        return 1
    return 0


def is_public(name: str) -> bool:
    """Return whether a name is promised."""
    home, _, short = name.rpartition(".")
    return short in importlib.import_module(home).__all__


if __name__ == "__main__":
    sys.exit(main())
