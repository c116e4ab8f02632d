#!/bin/bash
# PIP_SOURCE names another package index for machines that cannot reach the public ones; it has to hold Paddle for GPUs.
set -euo pipefail
apt-get update
apt-get install -y --no-install-recommends libgomp1
rm -rf /var/lib/apt/lists/*
python -m pip install --no-cache-dir ${PIP_SOURCE:+--index-url "$PIP_SOURCE"} numpy safetensors pillow packaging \
    psutil 'pydantic>=2.9' PyYAML
index=${PIP_SOURCE:-https://www.paddlepaddle.org.cn/packages/stable/cu126/}
python -m pip install --no-cache-dir --extra-index-url "$index" 'paddlepaddle-gpu>=3.3,<3.4'
