#!/usr/bin/env bash
# Build the servers that tests start, from pinned Go modules into .cache/bin.
#   tests/servers/build.sh [minio] [mc] [etcd] [kubernetes] [expression] [lws] [jobset]
#       [trainer]      (default: minio)
# A server that is there in the pinned version is not built again. Of lws only its definition of the
# resource is taken: .cache/bin/lws.yaml; those of jobset and trainer lie beside the programs.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
bin="$(cd "$here/../.." && pwd)/.cache/bin"

declare -A package=(
  [minio]=github.com/minio/minio
  [mc]=github.com/minio/mc
  [etcd]=.
  [kubernetes]=.
  [expression]=.
  [lws]=sigs.k8s.io/lws
  [jobset]=sigs.k8s.io/jobset
  [trainer]=github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager
)
declare -A module=(
  [lws]=sigs.k8s.io/lws
  [jobset]=sigs.k8s.io/jobset
  [trainer]=github.com/kubeflow/trainer/v2
)
declare -A definitions=(
  [lws]=config/crd/bases/*_leaderworkersets.yaml
  [jobset]=config/components/crd/bases/*.yaml
  [trainer]=manifests/base/crds/trainer.kubeflow.org_*.yaml
)
declare -A flags=(
  [kubernetes]='-X k8s.io/component-base/version.gitVersion=v1.34.4'
)

command -v go >/dev/null || {
  echo "building a server needs Go, which is not on the PATH: install it (package golang)" >&2
  exit 1
}
mkdir -p "$bin"
# Two builds at once would only wait for each other's processors.
exec 9>"$bin/.lock"
flock 9
for name in "${@:-minio}"; do
  [[ -n "${package[$name]:-}" ]] || {
    echo "a server must be one of ${!package[*]}, got '$name'" >&2
    exit 2
  }
  cd "$here/$name"
  if [[ -n "${definitions[$name]:-}" ]]; then
    export GOFLAGS=-mod=readonly
    go mod download "${module[$name]}"
    folder="$(go list -m -f '{{.Dir}}' "${module[$name]}")"
    # shellcheck disable=SC2086  # the pattern names several files
    for file in "$folder"/${definitions[$name]}; do
      echo ---
      cat "$file"
    done >"$bin/$name.new"
    mv "$bin/$name.new" "$bin/$name.yaml"
    [[ "$name" != lws ]] || continue
  fi
  stamp="$(cat go.mod go.sum ./*.go | sha256sum | cut -d' ' -f1) $(go env GOVERSION)"
  if [[ -x "$bin/$name" && "$(cat "$bin/$name.stamp" 2>/dev/null)" == "$stamp" ]]; then
    continue
  fi
  echo "building $name (minutes, once)" >&2
  # The binary is replaced at the end only, so that an interrupted build leaves nothing.
  GOFLAGS=-mod=readonly CGO_ENABLED=0 \
    go build -trimpath -buildvcs=false -ldflags "-s -w ${flags[$name]:-}" \
    -o "$bin/$name.new" "${package[$name]}"
  mv "$bin/$name.new" "$bin/$name"
  echo "$stamp" >"$bin/$name.stamp"
done
