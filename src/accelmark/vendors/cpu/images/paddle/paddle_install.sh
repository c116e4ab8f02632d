#!/bin/bash
# PIP_SOURCE names another package index for machines that cannot reach the public one.
set -euo pipefail
# Paddle's library of the processor's threads is not in the slim image.
apt-get update
apt-get install -y --no-install-recommends libgomp1
rm -rf /var/lib/apt/lists/*
python -m pip install --no-cache-dir ${PIP_SOURCE:+--index-url "$PIP_SOURCE"} 'paddlepaddle>=3.3,<3.4' numpy safetensors pillow packaging \
    psutil 'pydantic>=2.9' PyYAML
