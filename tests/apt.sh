#!/usr/bin/env bash
# apt.sh COMMAND...: read the package lists, then run COMMAND (an apt-get install); on failure print one reason, and
# what to do. The output of apt, which repeats a missing network for each file, goes to a log.
set -uo pipefail

log=$(mktemp "${TMPDIR:-/tmp}/accelmark-apt.XXXXXX")
export DEBIAN_FRONTEND=noninteractive
# An update that fails is no error by itself: the packages may be in the lists already.
apt-get -o Acquire::Retries=1 update -qq >"$log" 2>&1
if "$@" >>"$log" 2>&1; then
    rm -f "$log"
    exit 0
fi
reason=$(grep -m1 -E '^(E|W): ' "$log" | cut -c1-200)
echo "cannot install ${*: -1} and others with apt: ${reason:-no reason was printed}" >&2
echo "Connect to the network or set a mirror in /etc/apt, then run again. All output: $log" >&2
exit 1
