# SPDX-License-Identifier: Apache-2.0
"""`python -m forebay` is the `forebay` command."""

import sys

from forebay.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
