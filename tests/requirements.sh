#!/usr/bin/env bash
# What the tests need beyond Python packages: a browser that opens the reports, a PostgreSQL server to share a study on.
set -euo pipefail

need() {  # need COMMAND PACKAGE...
    command -v "$1" >/dev/null 2>&1 && return 0
    local command=$1
    shift
    if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
        echo "Installing $*"
        # Run level 1: a server that comes with a package is not started; the tests start their own.
        bash "$(dirname "$0")/apt.sh" env RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "$@"
    else
        echo "The tests need the command '$command' (Debian: $*). Install it and run again." >&2
        exit 1
    fi
}

need chromium chromium
need pg_createcluster postgresql
