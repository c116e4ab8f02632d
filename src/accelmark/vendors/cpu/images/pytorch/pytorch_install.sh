#!/bin/bash
# PIP_SOURCE names another package index for machines that cannot reach the public one.
set -euo pipefail
index=(--index-url "${PIP_SOURCE:-https://download.pytorch.org/whl/cpu}")
python -m pip install --no-cache-dir "${index[@]}" torch numpy
