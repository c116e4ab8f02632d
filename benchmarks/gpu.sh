#!/usr/bin/env bash
# Measures AccelMark on the accelerator here: gpu.sh CALL [--tiny] [--wheels DIR] [--data DIR] [--output DIR]; see gpu/README.md.
# PYTHON names an interpreter that has torch and transformers.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
wheels='' rest=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=${2:?--wheels needs a directory}; shift 2 ;;
        --wheels=*) wheels=${1#*=}; shift ;;
        *) rest+=("$1"); shift ;;
    esac
done
if [ -n "$wheels" ]; then
    # A virtual environment over the interpreter's packages: the audit reports packages that PYTHONPATH brings.
    environment=$(mktemp -d)
    trap 'rm -rf "$environment"' EXIT
    "$python" -m venv --without-pip "$environment"
    site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")' \
        > "$site/interpreter.pth"
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
    python=$environment/bin/python
fi
export PYTHONPATH="$root/src:$root${PYTHONPATH:+:$PYTHONPATH}"
"$python" -m benchmarks.gpu "${rest[@]}"
