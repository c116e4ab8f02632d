#!/usr/bin/env bash
# What the tests on clusters need beyond Python packages: SSH servers, container engines, Slurm. Nothing is started.
set -euo pipefail

missing=()
need() {  # need COMMAND PACKAGE...
    command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || missing+=("${@:2}")
}

need ip iproute2
need nsenter util-linux
need sshd openssh-server
need ssh openssh-client
need podman podman runc conmon netavark aardvark-dns slirp4netns catatonit uidmap iptables
need runc runc
need dockerd docker.io
need mksquashfs squashfs-tools
need squashfuse squashfuse
need debootstrap debootstrap
need slurmctld slurm-wlm
need munged munge
compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null || missing+=(libfaketime)

optional() {
    timeout 300 bash "$(dirname "$0")/apptainer.sh" || true
}

if [ "${#missing[@]}" = 0 ]; then
    optional
    exit 0
fi
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    echo "Installing ${missing[*]}"
    # No service may start on installation: the tests start what they need themselves.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        trap 'rm -f "$policy"' EXIT
    fi
    bash "$(dirname "$0")/../apt.sh" apt-get install -y -qq --no-install-recommends "${missing[@]}"
    optional
else
    echo "The tests on clusters need root and these packages: ${missing[*]}" >&2
    exit 1
fi
