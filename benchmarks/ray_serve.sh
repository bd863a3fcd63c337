#!/usr/bin/env bash
# Measure forebay beside Ray Serve, in an environment of their own. Arguments go to benchmarks/ray_serve.py; try --help.
set -euo pipefail
cd "$(dirname "$0")/.."

python=benchmarks/.venv-ray/bin/python
test -x $python || "${PYTHON:-python3}" -m venv benchmarks/.venv-ray
uv=$(command -v uv || echo .venv/bin/uv)
if [ -n "${PIP_FIND_LINKS:-}" ]; then export UV_FIND_LINKS="$PIP_FIND_LINKS"; fi
packages=(-c constraints.txt -e '.[ray]' 'ray[serve]' numpy)  # the constraints have the same Ray in both
if [ -x "$uv" ]; then
    "$uv" pip install --quiet --system-certs --python $python "${packages[@]}"
else
    $python -m pip install --quiet "${packages[@]}"
fi

exec $python -m benchmarks.ray_serve "$@"
