# `make demo` and `make test` are all a newcomer needs; both install what they need into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo demo-quick test test-matrix test-torch fuzz lint types benchmarks gpu-check clean

demo: $(INSTALLED)
	$(BIN)/python -m jagg_fx demo $(ARGS)

demo-quick: $(INSTALLED)
	$(BIN)/python -m jagg_fx demo --quick $(ARGS)

# Two workers, one thread each: most of the time is torch.compile's own Python.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

test: $(INSTALLED)
	$(PYTEST) $(ARGS)

# Every cell of the compatibility table, about an hour on 2 cores; writes it into the README.
test-matrix: $(INSTALLED)
	$(PYTEST) tests/test_matrix.py --matrix $(ARGS)

# The tests under another torch, in an environment of its own: make test-torch VERSION=2.12.0 ARGS="-m 'not inductor'"
OTHER := .venv-torch-$(VERSION)
test-torch:
	test -n "$(VERSION)" || { echo "which torch? make test-torch VERSION=2.12.0"; exit 2; }
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -v "^torch==" constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(VERSION)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHER)/constraints.txt -e ".[test]"
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n 2 --dist loadgroup $(ARGS)

# Random replay functions every way, about 90 minutes: ARGS="--cases 500 --seed 3", or --case with one that failed.
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz_check $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

# Each answers one question; minutes on 2 cores: step_time 11, overhead 9, peak_memory 15, compile_time 40, reward 50 for each of its
# two rewards. BENCHMARKS="step_time overhead" runs some of them, ARGS="--quick" makes them tiny.
BENCHMARKS ?= step_time overhead peak_memory compile_time reward
benchmarks: $(INSTALLED)
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; done

gpu-check: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

# torch first and alone: asked for by another package, pip would take the newest build with its several GB of CUDA.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e ".[test,lint]"
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) .venv-torch-* demo_out .pytest_cache .mypy_cache .ruff_cache
