#!/bin/bash
# torch and torch_npu have to be of the same version; torch_npu's releases name the CANN each goes with.
set -euo pipefail
version="${TORCH_VERSION:-2.5.1}"
python3 -m pip install --no-cache-dir ${PIP_SOURCE:+--index-url "$PIP_SOURCE"} "torch==${version}" "torch_npu==${version}" numpy pyyaml
