# train and checkpoint: torch, transformers and megatron-core.
ARG BASE=docker.io/library/python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
FROM ${BASE} AS build

# A mirror of the package index, and one more; their names and passwords stay out of the image.
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
RUN python -m venv /opt/planish
# Only what the package needs, so that a change of a test does not build the image again.
COPY pyproject.toml constraints.txt README.md LICENSE CHANGELOG.md /build/
COPY src /build/src
COPY components /build/components
COPY pipelines /build/pipelines
RUN /opt/planish/bin/python -m pip install --no-cache-dir --disable-pip-version-check --use-pep517 \
      --constraint /build/constraints.txt "/build[megatron,pipelines]"

FROM ${BASE}

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="planish/train" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"

# Triton builds a small C module for each kernel when it is first called. A base without the headers
# of its Python, such as the one of `--debian`, needs PACKAGES="gcc python3-dev".
ARG PACKAGES="gcc libc6-dev"
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install --no-install-recommends --yes ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/*

COPY --from=build /opt/planish /opt/planish

# Pods run as a user without a home; GPU pods get their own writable HOME.
# hadolint ignore=DL3064
ENV PATH=/opt/planish/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    HF_HOME=/tmp/huggingface \
    TOKENIZERS_PARALLELISM=false
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT []
