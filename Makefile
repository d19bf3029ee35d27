# Everything runs from .venv, which is created from requirements.lock. Requires make and Python >= 3.11.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
STAMP := $(VENV)/.installed
PROCESSES = $(or $(JOBS),$(shell $(PYTHON) -c 'import os; print(min(8, 2 * os.cpu_count()))'))

.DEFAULT_GOAL := help
.PHONY: help setup native kafka kafka-e2e axe demo test long check fmt docs e2e cov bench soak held lives torture siege fuzz lock all clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  %-9s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## create .venv, and install the pinned dependencies and shipper

$(STAMP): requirements.lock pyproject.toml $(wildcard native/*.* native/src/*)
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is required; to use another one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "make: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "make: installing the pinned packages into $(VENV), which takes a minute or more"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	@echo "make: installing shipper into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(MAKE) --no-print-directory native
	@touch $@

# The pinned crates name no registry; cargo adds its default one.
native/Cargo.lock: native/crates.lock
	rm -f $@
	cd native && cargo generate-lockfile --quiet
	source=$$(sed -n 's/^source = //p' $@ | head -n 1) && sed "s|^source = .*|source = $$source|" $< >$@

native: ## build the optional native extension, if cargo is available; it makes shipper faster
	@if ! command -v cargo >/dev/null; then \
		echo "make: cargo not found, so shipper runs without its native extension"; \
		exit; \
	fi; \
	echo "make: building the native extension, which takes a minute or more (log: $(VENV)/native.log)"; \
	if ! { $(MAKE) --no-print-directory native/Cargo.lock && \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r native/requirements.lock && \
		PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install --quiet --disable-pip-version-check --no-deps \
			--no-build-isolation --force-reinstall ./native; \
	} >$(VENV)/native.log 2>&1; then \
		echo "make: the native extension could not be built, see $(VENV)/native.log; shipper runs without it"; \
	fi

# The broker that the tests start. Without it, they are skipped.
kafka: ## fetch the jars of Apache Kafka into .kafka, for tests that need a broker (needs Java 17 and Maven)
	mvn --quiet --batch-mode -f tests/e2e/kafka/pom.xml dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/.kafka -DincludeScope=runtime
	cd .kafka && sha256sum --quiet --check ../tests/e2e/kafka/jars.sha256

kafka-e2e: setup ## run the long tests of consumer groups: ACLs, three nodes, rebalance storms, an oracle (EVENTS=300000)
	SHIPPER_NEEDS_KAFKA=1 SHIPPER_KAFKA_EVENTS=$(or $(EVENTS),300000) $(BIN)/pytest -m long tests/e2e/kafka $(if $(ONLY),-k $(ONLY))

axe: ## fetch axe-core into .axe, for the accessibility tests of the pages (needs npm)
	mkdir -p .axe && cd .axe && npm pack --silent axe-core@4.14.1 && tar xzf axe-core-4.14.1.tgz --strip-components 1 package/axe.min.js && rm axe-core-4.14.1.tgz

demo: setup ## ship 10,000 sample events to a sandbox in the same process, and show the totals of the report
	$(BIN)/shipper demo

# Always write bytecode, otherwise each test process would compile all tests again.
test: export PYTHONDONTWRITEBYTECODE :=
test: setup ## run all tests except the long ones, in JOBS processes (default: two for each core, at most 8)
	$(BIN)/pytest -n $(PROCESSES) --dist worksteal

long: setup ## run the long tests, except those that need a broker (see kafka-e2e)
	$(BIN)/pytest -m long --ignore tests/e2e/kafka -n $(PROCESSES) --dist worksteal

e2e: setup ## run only the tests that drive the installed command
	$(BIN)/pytest tests/e2e

check: setup ## check lint, format, types, import graph and generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit/test_import_graph.py tests/unit/test_docs_settings.py tests/unit/test_docs_man.py

fmt: setup ## format the code, and fix what the linter can fix
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

docs: setup ## generate docs/settings.md from the settings, and the man page docs/shipper.1 from the commands
	$(BIN)/python -m tests.unit.test_docs_settings
	$(BIN)/python -m tests.unit.test_docs_man

cov: setup ## run the tests with coverage
	$(BIN)/pytest --cov --cov-report=term-missing:skip-covered

bench: setup ## measure throughput (ROUNDS=5 EVENTS=500000 PEERS=all), and latency of followed files
	$(BIN)/python -m tests.bench --rounds $(or $(ROUNDS),5) --events $(or $(EVENTS),500000) $(if $(PEERS),--peers $(PEERS))
	$(BIN)/python -m tests.bench --rounds 1 --rows tail-idle,tail-busy,idle-1,idle-1000,idle-10000

soak: setup ## run for half an hour at full speed with rotation and faults, and check that nothing grows (MINUTES=30, SEED)
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

held: setup ## check memory and repeated deliveries with the most awkward records, in an outage, after a kill (EVENTS=5000000)
	$(BIN)/python -m tests.soak.held --events $(or $(EVENTS),5000000)

lives: setup ## simulate thousands of random file histories and outages; takes some minutes (SEED=1)
	$(BIN)/python -m tests.soak.lives $(if $(SEED),--seed $(SEED))

torture: setup ## make everything fail at once, and check that nothing is lost (SEED, DURATION=600 seconds)
	$(BIN)/python -m tests.torture $(if $(SEED),--seed $(SEED)) --duration $(or $(DURATION),600)

siege: setup ## mix hostile input, answers and clients with good records (SEED, DURATION=1800 seconds)
	$(BIN)/python -m tests.siege $(if $(SEED),--seed $(SEED)) --duration $(or $(DURATION),1800)

fuzz: setup ## fuzz everything that reads untrusted bytes (EXECUTIONS=1000000, SEED)
	$(BIN)/python -m tests.fuzz --executions $(or $(EXECUTIONS),1000000) $(if $(SEED),--seed $(SEED))

lock: setup ## update requirements.lock to the newest versions, with hashes and without an index address
	$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
		--python-version 3.11 --all-extras --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml
	$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
		--python-version 3.11 --group native/pyproject.toml:build --custom-compile-command "make lock" --output-file native/requirements.lock
	rm -f native/Cargo.lock
	cd native && cargo generate-lockfile --quiet
	sed 's|^source = .*|source = "registry"|' native/Cargo.lock >native/crates.lock

all: check test ## run check and test

clean: ## remove everything that make created
	rm -rf $(VENV) native/target .bench .kafka .axe .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
