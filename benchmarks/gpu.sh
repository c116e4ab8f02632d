#!/usr/bin/env bash
# The campaign on an accelerator; see gpu/README.md.
#   gpu.sh pack [--out FILE]                        one archive: sources, wheels that the image lacks, two small data sets
#   gpu.sh run --budget-s SECONDS [--archive FILE]  measure in order of value; a second call goes on where the first ended
# PYTHON names an interpreter that has torch and transformers.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
verb=${1:?"pack or run"}
shift
if [ "$verb" = pack ]; then
    cd "$root"
    exec env PYTHONPATH="$root/src:$root" "$python" -m benchmarks.gpu.pack "$@"
fi
[ "$verb" = run ] || { echo "gpu.sh: pack or run, not $verb" >&2; exit 2; }
archive=$root/gpu-campaign.tar.xz rest=()
while [ $# -gt 0 ]; do
    case $1 in
        --archive) archive=${2:?--archive needs a file}; shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ -f "$archive" ]; then
    mkdir "$scratch/campaign"
    tar -xJf "$archive" -C "$scratch/campaign"
    root=$scratch/campaign
fi
if [ -d "$root/wheels" ]; then
    # A virtual environment over the interpreter's packages: the audit reports packages that PYTHONPATH brings.
    "$python" -m venv --without-pip "$scratch/venv"
    site=$("$scratch/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")' \
        > "$site/interpreter.pth"
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$root"/wheels/*.whl
    python=$scratch/venv/bin/python
fi
[ ! -d "$root/data" ] || rest+=(--data "$root/data")
export PYTHONPATH="$root/src:$root${PYTHONPATH:+:$PYTHONPATH}"
"$python" -m benchmarks.gpu "${rest[@]}"
