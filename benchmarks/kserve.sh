#!/usr/bin/env bash
# Make environments of their own for the peers of benchmarks/kserve.py: their requirements meet neither ours nor each other's.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=$(command -v uv || echo .venv/bin/uv)
if [ -n "${PIP_FIND_LINKS:-}" ]; then export UV_FIND_LINKS="$PIP_FIND_LINKS"; fi
make() {
    test -x "benchmarks/.venv-$1/bin/python" || "${PYTHON:-python3}" -m venv "benchmarks/.venv-$1"
    "$uv" pip install --quiet --python "benchmarks/.venv-$1/bin/python" "${@:2}"
}
make kserve msgspec 'kserve==0.21.0'
make mlserver msgspec 'mlserver==1.7.1' 'uvloop<0.22'
make triton msgspec 'nvidia-pytriton==0.7.0'
