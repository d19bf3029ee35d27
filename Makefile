# Everything runs from .venv, which is made from requirements.lock. Needed on the machine: make and Python >= 3.11.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
STAMP := $(VENV)/.installed
PROCESSES = $(or $(JOBS),$(shell $(PYTHON) -c 'import os; print(min(8, 1 + os.cpu_count()))'))

.DEFAULT_GOAL := help
.PHONY: help setup native kafka kafka-e2e axe demo test long check fmt docs e2e cov bench soak held lives torture siege fuzz lock all clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  %-9s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## make .venv and install the pinned dependencies and shipper itself

$(STAMP): requirements.lock pyproject.toml $(wildcard native/*.* native/src/*)
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed; name it with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "make: making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "make: installing the pinned packages into $(VENV), which takes a minute or more"
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@echo "make: installing shipper into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(MAKE) --no-print-directory native
	@touch $@

# What is pinned names no registry; cargo says which one is its default.
native/Cargo.lock: native/crates.lock
	rm -f $@
	cd native && cargo generate-lockfile --quiet
	source=$$(sed -n 's/^source = //p' $@ | head -n 1) && sed "s|^source = .*|source = $$source|" $< >$@

native: ## build the native part where there is cargo; shipper does the same without it, slower
	@if ! command -v cargo >/dev/null; then \
		echo "make: cargo is not found, so shipper runs without its native part"; \
		exit; \
	fi; \
	echo "make: building the native part, which takes a minute or more (log: $(VENV)/native.log)"; \
	if ! { $(MAKE) --no-print-directory native/Cargo.lock && \
		$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r native/requirements.lock && \
		PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install --quiet --disable-pip-version-check --no-deps \
			--no-build-isolation --force-reinstall ./native; \
	} >$(VENV)/native.log 2>&1; then \
		echo "make: the native part could not be built, see $(VENV)/native.log; shipper runs without it"; \
	fi

# The broker that the tests start; where it is missing, they are skipped.
kafka: ## fetch the jars of Apache Kafka into .kafka, for the tests that need a broker (Java 17, Maven)
	mvn --quiet --batch-mode -f tests/e2e/kafka/pom.xml dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/.kafka -DincludeScope=runtime
	cd .kafka && sha256sum --quiet --check ../tests/e2e/kafka/jars.sha256

kafka-e2e: setup ## the long tests of consumer groups: rights, three nodes, storms, an oracle (EVENTS=300000)
	SHIPPER_NEEDS_KAFKA=1 SHIPPER_KAFKA_EVENTS=$(or $(EVENTS),300000) $(BIN)/pytest -m long tests/e2e/kafka $(if $(ONLY),-k $(ONLY))

axe: ## fetch axe-core into .axe, for the test of the pages' accessibility (npm)
	mkdir -p .axe && cd .axe && npm pack --silent axe-core@4.14.1 && tar xzf axe-core-4.14.1.tgz --strip-components 1 package/axe.min.js && rm axe-core-4.14.1.tgz

demo: setup ## ship 10,000 sample events to a sandbox in the same process and show totals of the report
	$(BIN)/shipper demo

# Bytecode is written even where the environment forbids it: each process would compile all tests anew.
test: export PYTHONDONTWRITEBYTECODE :=
test: setup ## all tests but the long ones, in as many processes as JOBS says (one more than there are cores, up to 8)
	$(BIN)/pytest -n $(PROCESSES) --dist worksteal

long: setup ## the tests that take long, but for those of a broker, which kafka-e2e runs
	$(BIN)/pytest -m long --ignore tests/e2e/kafka -n $(PROCESSES) --dist worksteal

e2e: setup ## only the tests that drive the installed command
	$(BIN)/pytest tests/e2e

check: setup ## lint, format, types, import graph, generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit/test_import_graph.py tests/unit/test_docs_settings.py tests/unit/test_docs_man.py

fmt: setup ## format, and fix what the linter can fix
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

docs: setup ## write docs/settings.md from the types of the settings, and the man page docs/shipper.1 from the commands
	$(BIN)/python -m tests.unit.test_docs_settings
	$(BIN)/python -m tests.unit.test_docs_man

cov: setup ## tests with coverage
	$(BIN)/pytest --cov --cov-report=term-missing:skip-covered

bench: setup ## throughput table (ROUNDS=5 EVENTS=500000 PEERS=all), latency of following
	$(BIN)/python -m tests.bench --rounds $(or $(ROUNDS),5) --events $(or $(EVENTS),500000) $(if $(PEERS),--peers $(PEERS))
	$(BIN)/python -m tests.bench --rounds 1 --rows tail-idle,tail-busy,idle-1,idle-1000,idle-10000

soak: setup ## half an hour at full speed with rotation and faults: does anything grow (MINUTES=30, SEED)
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

held: setup ## memory and repeats with the most awkward records, in an outage, after a kill (EVENTS=5000000)
	$(BIN)/python -m tests.soak.sparse --events $(or $(EVENTS),5000000)

lives: setup ## thousands of random lives of files (SEED=1), and outages: some minutes
	$(BIN)/python -m tests.soak.sources_soak $(SEED)
	$(BIN)/python -m tests.soak.delivery_soak

torture: setup ## everything fails at once, and nothing may be lost (SEED, DURATION=600 seconds)
	$(BIN)/python -m tests.torture $(if $(SEED),--seed $(SEED)) --duration $(or $(DURATION),600)

siege: setup ## hostile input, answers and clients for half an hour, good records between (SEED, DURATION=1800 seconds)
	$(BIN)/python -m tests.siege $(if $(SEED),--seed $(SEED)) --duration $(or $(DURATION),1800)

fuzz: setup ## hostile input to everything that reads foreign bytes (EXECUTIONS=1000000, SEED)
	$(BIN)/python -m tests.fuzz --executions $(or $(EXECUTIONS),1000000) $(if $(SEED),--seed $(SEED))

lock: setup ## update requirements.lock: newest versions, hashes, no index address
	$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
		--python-version 3.11 --all-extras --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml
	$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
		--python-version 3.11 --group native/pyproject.toml:build --custom-compile-command "make lock" --output-file native/requirements.lock
	rm -f native/Cargo.lock
	cd native && cargo generate-lockfile --quiet
	sed 's|^source = .*|source = "registry"|' native/Cargo.lock >native/crates.lock

all: check test ## check and test

clean: ## remove everything that make created
	rm -rf $(VENV) native/target .bench .kafka .axe .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
