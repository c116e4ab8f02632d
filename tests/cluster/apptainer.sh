#!/usr/bin/env bash
# Install Apptainer, of which Debian 12 has no package: that of Debian's unstable distribution, in a directory of its own with the C
# library that it needs. Where that fails, it leaves nothing but a message, and the tests that run Apptainer are skipped.
set -euo pipefail

place=/opt/accelmark-apptainer
if command -v apptainer >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1 || [ "$(dpkg --print-architecture)" != amd64 ]; then exit 0; fi

work=$(mktemp -d "${TMPDIR:-/tmp}/accelmark-apptainer.XXXXXX")
trap 'rm -rf "$work"; [ -e /usr/local/bin/apptainer ] || { rm -rf "$place"; echo "Apptainer cannot be installed: its tests are skipped" >&3; }' EXIT
exec 3>&2 >/dev/null 2>&1 </dev/null

mirror=$(apt-get indextargets --format '$(LABEL) $(SITE)' 'Created-By: Packages' | sed -n 's/^Debian //p' | head -1)
mkdir -p "$work"/{lists,cache/archives}/partial "$work/debs"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror unstable main" >"$work/unstable.list"
options=(-o "Dir::Etc::sourcelist=$work/unstable.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$work/lists"
    -o "Dir::Cache=$work/cache" -o Dir::State::status=/dev/null -o Acquire::Retries=1)
command -v patchelf || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends patchelf
apt-get "${options[@]}" update
(cd "$work/debs" && apt-get "${options[@]}" download apptainer libc6 libseccomp2 libsqlite3-0)
for package in "$work"/debs/*.deb; do dpkg-deb --extract "$package" "$place"; done

# It finds its files relative to its own place; what the package has outside of /usr is expected there, too.
libraries=$place/usr/lib/x86_64-linux-gnu
mv "$place/etc" "$place/usr/etc"
mkdir -p "$place/usr/lib/var/lib/apptainer/mnt/session"
for program in "$place/usr/bin/apptainer" "$libraries/apptainer/bin/starter"; do
    patchelf --set-interpreter "$place/usr/lib64/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries" "$program"
done
"$place/usr/bin/apptainer" buildcfg
ln -s "$place/usr/bin/apptainer" /usr/local/bin/apptainer
