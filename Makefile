# `make serve` and `make test` first set up .venv if needed.
# Another accelerator: `make setup EXTRAS=vllm,dev` (NVIDIA). Another interpreter: `make PYTHON=...`.

EXTRAS ?= cpu,dev
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	2>/dev/null && echo "$$p" && break; done)
FREE_GB ?= 6

# With it each process of `cato serve` and of the tests, and there are many, compiles CATO again.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.setup-$(EXTRAS)
say := @printf '\033[1m==> %s\033[0m\n'

.DEFAULT_GOAL := help
.PHONY: help setup serve test agents drills check lint bench fuzz soak audit clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv with all dependencies (a few minutes, once)

serve: $(STAMP)  ## run the demo model on this machine; prints the URL
	@$(BIN)/cato serve

lint: $(STAMP)  ## format, lint, types, layers
	$(say) 'format'
	@$(BIN)/ruff format --check
	$(say) 'lint'
	@$(BIN)/ruff check
	$(say) 'types'
	@$(BIN)/mypy --strict cato
	$(say) 'layers'
	@$(BIN)/lint-imports --no-logo

check: lint  ## lint, unit and simulator tests: no Ray, a minute or two
	$(say) 'unit and simulator tests'
	@$(BIN)/python -m pytest -q -n auto -m 'not slow' tests/unit tests/arch tests/sim

# The soak sleeps for most of its five minutes, and other tests for some of theirs: four workers.
# Live tests wait for other processes half of the time: two groups of them and lint run together.
# They kill processes and race with them on shared cores: failed tests run once more against a
# new application, and both outcomes are printed. A test that fails twice fails.
BESIDE := -n 2 --dist loadscope --no-loadscope-reorder
test: $(STAMP)  ## check with slow tests, then live tests on a local Ray with real vLLM (minutes)
	$(say) 'in the background: installing clients for live tests'
	@nice $(BIN)/python tests/live/clients/installed.py > /dev/null 2>&1 &
	$(say) 'unit and simulator tests, with slow ones'
	@$(BIN)/python -m pytest -q -n 4 --dist worksteal tests/unit tests/arch tests/sim
	$(say) 'live tests; beside them lint'
	@log=$$(mktemp); nice -n 19 $(MAKE) --no-print-directory lint > "$$log" 2>&1 & lint=$$!; failed=0; \
	$(BIN)/python -m pytest -q $(BESIDE) tests/live || { printf '\033[1m==> failed tests once more\033[0m\n'; \
	    $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none tests/live; } || failed=1; \
	wait $$lint || failed=1; cat "$$log"; rm "$$log"; exit $$failed

agents: $(STAMP)  ## run six coding agents against CATO; installs them (2.2 GB in .cache)
	@CATO_AGENTS=all $(BIN)/python -m pytest -q tests/live/agents

drills: $(STAMP)  ## kill and stop real vLLM engines on two hosts; roll out under 50 streams (minutes)
	@CATO_DRILLS=1 $(BIN)/python -m pytest -q tests/live/test_drills.py tests/live/test_rollouts.py \
	    tests/live/test_conversations_vllm.py tests/live/test_serve_cli.py

bench: $(STAMP)  ## overhead per request: the engine alone, plain Serve, CATO
	@$(BIN)/cato bench overhead

fuzz: $(STAMP)  ## 130,000 malformed requests, 20,000 broken files, hostile code (40 minutes)
	$(say) "5,000 requests to each API, CATO's own and Tabby's"
	@CATO_FUZZ_CASES=5000 $(BIN)/python -m pytest -q --timeout 0 tests/unit/serve/test_ingress_fuzz.py
	$(say) '10,000 broken workflow and deployment files, twice'
	@CATO_FUZZ_CASES=10000 $(BIN)/python -m pytest -q --timeout 0 tests/unit/serve/test_fuzz.py -k files
	$(say) '50,000 bodies of every dialect changed, 50,000 that are no JSON'
	@CATO_FUZZ_CASES=50000 $(BIN)/python -m pytest -q --timeout 0 tests/unit/serve/test_fuzz.py -k 'bodies or bytes'
	$(say) '20,000 numbers of any size, 2,000 texts that keep a grammar busy'
	@CATO_FUZZ_CASES=20000 $(BIN)/python -m pytest -q --timeout 0 tests/unit/serve/test_fuzz.py -k numbers
	@CATO_FUZZ_CASES=2000 $(BIN)/python -m pytest -q --timeout 0 tests/unit/serve/test_fuzz.py -k grammar
	$(say) '2,000 templates that ask for more work than they may do'
	@CATO_FUZZ_CASES=6000 $(BIN)/python -m pytest -q --timeout 0 tests/unit/serve/test_fuzz.py -k templates

soak: $(STAMP)  ## two hours of load, with faults in one process, then on Ray; memory must stay flat
	@$(BIN)/cato chaos --plan deployments/drills/soak.yaml --growth 20
	@$(BIN)/cato chaos --ray --plan deployments/drills/soak-ray.yaml --growth 2.4

audit: $(STAMP)  ## known vulnerabilities of the dependencies, and their bill of materials (build/)
	@.ci/audit

clean:  ## remove .venv and all caches of this checkout
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip installs CUDA builds of these beside the CPU build of torch. Their libraries are missing then,
# and transformers fails when it finds them. triton: 1 GB, GPU only.
CLASHING := torchvision torchaudio torchcodec triton

# The stamp holds a digest of the parts of pyproject.toml that pip reads, so that a change of a linter's
# settings does not download the clashing packages again.
DIGEST = $$("$(PYTHON)" -c 'import hashlib, tomllib; \
	print(hashlib.sha256(repr(tomllib.load(open("pyproject.toml", "rb"))["project"]) \
	.encode()).hexdigest())')

$(STAMP): pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
	    echo 'error: CATO needs Python 3.11, 3.12 or 3.13, and none is on the PATH.' >&2; \
	    echo '       Install one, or name it: make PYTHON=/path/to/python3.11' >&2; exit 1; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	    echo 'error: $(PYTHON) does not run, or is not Python 3.11, 3.12 or 3.13.' >&2; exit 1; }
	@for other in .venv/.setup-*; do \
	    if [ -e "$$other" ] && [ "$$other" != '$@' ]; then \
	        echo "error: .venv was set up with other extras ($${other#.venv/.setup-}):" >&2; \
	        echo '       `make clean` first' >&2; exit 1; fi; done
	@if [ "$$(cat $@ 2>/dev/null)" = "$(DIGEST)" ]; then touch $@; else \
	    $(MAKE) --no-print-directory install; fi

.PHONY: install
install:
	@need=$(FREE_GB); if [ -d .venv/lib ]; then need=1; fi; \
	free=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'); \
	if [ "$$free" -lt "$$need" ]; then \
	    echo "error: setting up needs $$need GB, $$free GB are free on the disk of $$(pwd)." >&2; \
	    echo '       Free some, or go on with less: make setup FREE_GB=...' >&2; exit 1; fi
	$(say) '1/4 virtual environment in .venv ($(PYTHON))'
	@[ -x $(BIN)/pip ] || "$(PYTHON)" -m venv .venv || { \
	    echo 'error: no virtual environment; Debian and Ubuntu need the package python3-venv.' >&2; \
	    rm -rf .venv; exit 1; }
	$(say) '2/4 installing .[$(EXTRAS)] (about 4 GB; minutes)'
	@$(BIN)/python .ci/install.py -e '.[$(EXTRAS)]' || { \
	    echo 'error: pip failed; its own words are above. Most often: no network, an index that' >&2; \
	    echo '       cannot be reached (set PIP_INDEX_URL or a proxy), or a full disk.' >&2; \
	    echo '       `make setup` goes on where this stopped.' >&2; exit 1; }
	$(say) '3/4 removing packages that clash with the CPU build of torch'
	@case ',$(EXTRAS),' in *,cpu,*) \
	    $(BIN)/python -m pip uninstall --disable-pip-version-check -q -y $(CLASHING);; \
	    *) echo 'not a CPU build: nothing to do';; esac
# Tests of packages are never imported, and of transformers' hundreds of models a few.
	$(say) '4/4 compiling bytecode (a minute, once; importing vLLM takes twice as long without)'
	@$(BIN)/python -m compileall -q -j 2 -x '/tests/|/transformers/models/' cato \
	    "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" \
	    >/dev/null 2>&1 || true  # some packages ship templates that are not Python
	@echo "$(DIGEST)" > $(STAMP)
	$(say) 'ready'
