#!/usr/bin/env bash
# Build the servers that tests start, from pinned Go modules into .cache/bin.
#   tests/servers/build.sh [minio] [etcd] [kubernetes]      (default: minio)
# A server that is there in the pinned version is not built again.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
bin="$(cd "$here/../.." && pwd)/.cache/bin"

declare -A package=(
  [minio]=github.com/minio/minio
)

command -v go >/dev/null || {
  echo "building a server needs Go, which is not on the PATH: install it (package golang)" >&2
  exit 1
}
mkdir -p "$bin"
for name in "${@:-minio}"; do
  [[ -n "${package[$name]:-}" ]] || {
    echo "a server must be one of ${!package[*]}, got '$name'" >&2
    exit 2
  }
  cd "$here/$name"
  stamp="$(cat go.mod go.sum | sha256sum | cut -d' ' -f1) $(go env GOVERSION)"
  if [[ -x "$bin/$name" && "$(cat "$bin/$name.stamp" 2>/dev/null)" == "$stamp" ]]; then
    continue
  fi
  echo "building $name (minutes, once)" >&2
  # The build replaces the binary at its end only, so that an interrupted one leaves nothing.
  GOFLAGS=-mod=readonly CGO_ENABLED=0 \
    go build -trimpath -buildvcs=false -ldflags '-s -w' -o "$bin/$name.new" "${package[$name]}"
  mv "$bin/$name.new" "$bin/$name"
  echo "$stamp" >"$bin/$name.stamp"
done
