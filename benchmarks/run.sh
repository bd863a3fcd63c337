#!/usr/bin/env bash
# Measure forebay beside other model servers. They get an environment of their own, so that their
# requirements never meet those of the project. Arguments go to benchmarks/main.py; try --help.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v wrk >/dev/null || { echo "the load generator wrk is missing; on Debian: apt-get install wrk" >&2; exit 1; }

python=benchmarks/.venv/bin/python
test -x $python || "${PYTHON:-python3}" -m venv benchmarks/.venv
uv=$(command -v uv || echo .venv/bin/uv)
if [ -n "${PIP_FIND_LINKS:-}" ]; then export UV_FIND_LINKS="$PIP_FIND_LINKS"; fi
if [ -x "$uv" ]; then
    "$uv" pip install --quiet --python $python -r benchmarks/requirements.txt -e .
else
    $python -m pip install --quiet -r benchmarks/requirements.txt -e .
fi

exec $python -m benchmarks.main "$@"
