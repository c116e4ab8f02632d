#!/usr/bin/env bash
# Measures training on the accelerator here in one call of under ten minutes; see gpu.py for what and how.
# PYTHON names an interpreter that has torch, transformers and AccelMark's own requirements.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if ! "$python" -c 'import psutil, pydantic, rich, torch, transformers, yaml' 2>/dev/null; then
    echo "$python lacks torch, transformers or a requirement of AccelMark: pip install -e '.[torch,models,nvidia]'" >&2
    exit 2
fi
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" benchmarks/gpu.py "$@"
