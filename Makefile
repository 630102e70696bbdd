# What people and CI type. `make` alone lists the targets.
#
# Needs make, git and python3 (3.11 or newer, with venv); no root. Everything else goes into .venv,
# exactly as requirements.lock says.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTOS := $(sort $(wildcard proto/hutch/v1/*.proto))
OUT ?= out/stdlib_census
SEED ?= 1
RUNS ?= 1000
EXAMPLES ?= 5000

FUZZED := $(addprefix tests/unit/test_,contracts_fuzz.py contracts_worker.py files_fuzz.py host_inbound.py \
    runtime_frames.py runtime_values.py)

generate = $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(1) --grpc_python_out=$(1) \
    --mypy_out=$(1) --mypy_grpc_out=$(1) $(PROTOS)

# The stub generators and hutch itself are found in the environment, whether it is active or not.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help demo test test-docker soak fuzz sim check images images-pin test-images proto bench lock clean prerequisites

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## Measure the standard library with a tree of sandboxes, one for each package
	@mkdir -p $(OUT)
	$(BIN)/hutch run examples/programs/stdlib_census.py --max-depth 3 --out $(OUT) \
	    --returns @examples/programs/stdlib_census.schema.json >$(OUT)/value.json

test: $(STAMP) ## Run every test that this machine can run
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-docker: $(STAMP) ## Run what needs a container engine; root on Debian gets one for the while
	images/engine $(BIN)/python -m pytest -m "docker and not soak" $(PYTEST_ARGS) || [ $$? = 77 ]

soak: $(STAMP) ## Run the tests that have full sizes, which take minutes
	$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

fuzz: $(STAMP) ## Try EXAMPLES inputs on each decoder, schema check and check of names
	HYPOTHESIS_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest $(FUZZED) $(PYTEST_ARGS)

sim: $(STAMP) ## Simulate hosts, faults and recovery: RUNS seeds, the first is SEED
	$(BIN)/python -m tests.simulation $(SEED) $(RUNS)

check: $(STAMP) ## Lint, types, import rules, wire contract, generated files, tidiness
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	rm -rf build/stubs && mkdir -p build/stubs
	$(call generate,build/stubs)
	diff -r -x __init__.py -x __pycache__ -x py.typed build/stubs/hutch/v1 hutch/v1
	$(BIN)/python -m pytest tests/tidy $(PYTEST_ARGS)

images: $(STAMP) ## Build the images that sandboxes may be made from (root, or a user namespace)
	$(BIN)/python -m images.build $(IMAGES_ARGS)

images-pin: $(STAMP) ## Write the digests of the official Python images, where a registry answers
	$(BIN)/python -m images.pin

test-images: $(STAMP) ## Build the images twice and look at what is in them
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --require-hashes --upgrade \
	    --requirement tests/images/requirements.lock --target build/test-images
	$(BIN)/python -m pytest -m images tests/images $(PYTEST_ARGS)

proto: $(STAMP) ## Regenerate hutch/v1 from proto/
	rm -f hutch/v1/*_pb2*
	$(call generate,.)

bench: $(STAMP) ## Measure, and write JSON into bench/results/
	$(BIN)/python -m bench.run $(BENCH_ARGS)

lock: $(STAMP) ## Renew requirements.lock from pyproject.toml
	PIP_CONFIG_FILE=/dev/null $(BIN)/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe \
	    --strip-extras --extra dev --all-build-deps --no-header --no-emit-index-url \
	    --no-emit-trusted-host --no-emit-find-links --output-file requirements.lock pyproject.toml

clean: ## Remove what make made, .venv included
	rm -rf $(VENV) *.egg-info build out bench/results .mypy_cache .ruff_cache .pytest_cache
	rm -rf .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --no-build-isolation: the build back end is the locked one too, not one fetched at that moment.
$(STAMP): requirements.lock pyproject.toml | prerequisites
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
	    --no-deps --requirement requirements.lock
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps --no-build-isolation --editable .
	@touch $@

prerequisites:
	@command -v git >/dev/null 2>&1 && $(PYTHON) -c \
	    'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || { \
	    echo "hutch needs git and python3 >= 3.11 with venv. On Debian or Ubuntu:" >&2; \
	    echo "    sudo apt-get install -y make git python3 python3-venv" >&2; \
	    exit 1; }
