#!/usr/bin/env bash
# Install servers that are Python programs, each in an environment of its own below .cache.
# Usage: python.sh UV SERVER...    A server that is there in the pinned versions stays.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cache="$(cd "$here/../.." && pwd)/.cache"
uv="$(realpath "$1")"
shift

mkdir -p "$cache"
exec 9>"$cache/python.lock"
flock 9
for name in "$@"; do
  wanted="$here/$name/requirements.txt"
  cmp -s "$wanted" "$cache/$name/installed.txt" && continue
  echo "installing $name (a minute, once)" >&2
  rm -rf "${cache:?}/$name"
  "$uv" venv --quiet --python "$(dirname "$uv")/python" "$cache/$name"
  "$uv" pip install --quiet --python "$cache/$name/bin/python" --compile-bytecode -r "$wanted"
  cp "$wanted" "$cache/$name/installed.txt"
done
