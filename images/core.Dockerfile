# prepare, reward, next, report and resharding: opens data and models, without torch.
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
      --constraint /build/constraints.txt "/build[curate,reward,pipelines]"

FROM ${BASE}

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="planish/core" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"

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
