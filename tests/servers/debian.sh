#!/usr/bin/env bash
# Install Debian packages whose program is missing, where this machine lets us: as root, with apt.
# Usage: debian.sh PROGRAM=PACKAGE...    Their services are not started.
set -uo pipefail

missing=()
for pair in "$@"; do
  command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
done
test "${#missing[@]}" = 0 && exit 0

install() {
  export DEBIAN_FRONTEND=noninteractive
  # Without systemd the packages' own scripts would start the servers.
  local policy=/usr/sbin/policy-rc.d
  if ! test -e "$policy"; then
    printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod +x "$policy" || return 1
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  local apt=(apt-get -qq -o DPkg::Lock::Timeout=120)
  "${apt[@]}" install -y --no-install-recommends "$@" >/dev/null 2>&1 \
    || { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "$@" >/dev/null; }
}

if ! { command -v apt-get >/dev/null && test "$(id -u)" = 0 && install "${missing[@]}"; }; then
  echo "missing: ${missing[*]}; the tests that need them will be skipped"
fi
