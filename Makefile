# Every target sets up what it needs. `make help` lists them.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup system demo matrix detect test slow lint bench crash fuzz survival docs wheelhouse clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch comes through constraints.txt, so that a development install never fetches another build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) tools/require_python.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	@touch $(READY)

system: ## install the system programs of the drills (apt, as root), or name what is missing
	@sh tools/system_packages.sh

setup: system $(READY) ## create the virtual environment and install everything into it

# Several nodes need root; without it one node, of which only processes are killed.
demo: setup ## cut the power of a small training job on two nodes, show RTO, RPO and whether it is identical
	@mkdir -p build
	$(BIN)/ridethrough drill $$([ $$(id -u) = 0 ] && echo two-nodes || echo power-cut) --target-rto 180s --target-rpo-steps 20 --history build/drills --output build/drill.json
	@$(BIN)/python bench/figures.py demo build/drill.json

matrix: setup ## 40 cuts of three nodes in every phase and order of return, every other drill of several nodes, every sabotage
	$(BIN)/python bench/matrix.py
	CI=true RIDETHROUGH_SABOTAGE=full $(BIN)/python -m pytest tests/end_to_end/test_drill.py -k sabotaged

detect: setup ## how soon a dead process and a silent node are noticed, beside plain torchrun; what healthy jobs survive
	$(BIN)/python bench/detect.py
	$(BIN)/python bench/healthy.py

test: setup ## run all tests
	$(BIN)/python -m pytest

slow: setup ## the tests that `make test` leaves out: more file systems, hosts, instants and faults of what it tests
	CI=true $(BIN)/python -m pytest -m slow

lint: $(READY) ## style, types, layers, licences
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_licences.py

bench: setup ## what a snapshot, a durable save and a copy cost, as ratios to plain copies, writes and uploads
	@mkdir -p build
	$(BIN)/python bench/save_path.py
	$(BIN)/python bench/places.py

# CI=true: a layer that this machine cannot run must fail here, not be missing from the table.
crash: setup ## cut the save path everywhere: every legal state in a model, every flush boundary of ext4, xfs and btrfs, live file systems
	@mkdir -p build
	@rm -f build/crash-rows.json
	CI=true RIDETHROUGH_ROWS=build/crash-rows.json RIDETHROUGH_LONG_RUN_SAVES=10000 RIDETHROUGH_CUTS=200 RIDETHROUGH_LIVE_CUTS=170 RIDETHROUGH_BLOCK_IMAGES=0 \
		RIDETHROUGH_CRASH=full $(BIN)/python -m pytest -p no:randomly -s tests/crash/test_crash_full.py tests/store/test_cuts.py tests/store/test_live_cuts.py tests/store/test_block_cuts.py tests/store/test_long_run.py
	@$(BIN)/python bench/figures.py crash build/crash-rows.json

fuzz: setup ## ten minutes of damaged and hostile bytes for every reader, one a core: crash, hang, memory, code, lies
	$(BIN)/python bench/fuzz.py --minutes 10

# A virtual environment of its own: other engines are large, and one that cannot be installed is a row with its reason.
survival: system ## the same power cuts on the checkpoints of other engines, beside ours
	$(PYTHON) -m venv build/survival-venv
	build/survival-venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch]'
	-grep -v '^#' bench/survival-requirements.txt | xargs -n 1 build/survival-venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -c bench/survival-requirements.txt
	build/survival-venv/bin/python bench/survival.py

docs: $(READY) ## regenerate the generated pages and check every link
	$(BIN)/python docs/generate.py
	$(BIN)/python -m pytest -q tests/test_docs.py

wheelhouse: $(READY) ## wheels of the package and its core dependencies, for clusters without a network
	$(BIN)/pip wheel --quiet --disable-pip-version-check --wheel-dir build/wheelhouse .
	@ls build/wheelhouse

clean: ## remove what the targets made
	rm -rf build $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
