#!/bin/bash
# Installs what stands in packages/: corex-installer-*.run and the wheels of torch for CoreX.
set -euo pipefail
apt-get update
apt-get install -y --no-install-recommends python3 python3-pip libelf1 numactl
for installer in /tmp/packages/corex-installer-*.run; do
    bash "${installer}" --silent --toolkit
done
python3 -m pip install --no-cache-dir ${PIP_SOURCE:+--index-url "$PIP_SOURCE"} /tmp/packages/*.whl
