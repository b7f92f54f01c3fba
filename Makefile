# Every target makes what it needs: `make fit` on a fresh machine installs first. CI runs these same targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LOWEST := $(VENV)-lowest
UNIT   := tests/rankzero tests/lightning_modules tests/data_modules tests/test_imports.py
ARGS   ?=

.PHONY: fit install test test-system test-lowest test-processors lint types check bench soak test-image containers/requirements.txt system-tools image-tools clean

fit: install                      ## train the default: a small ResNet on handwritten digits
	$(BIN)/python launch/fit.py $(ARGS)

install: $(VENV)/.installed       ## make .venv with everything in it

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Rankzero needs Python 3.10 or newer; found $$($(PYTHON) --version). Type: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 2; }
	@echo "Making $(VENV) and installing (several GB with PyTorch; a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@

test: install                     ## unit tests: minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadgroup -m "not soak and not system" $(ARGS)

test-system: install              ## tests with real parts: Slurm, MPI, torchrun, network namespaces, sshd, strace (as root)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 4 --dist loadgroup -m "system and not soak" $(ARGS)

test-lowest: $(LOWEST)/.installed ## unit tests with the lowest versions that pyproject.toml allows
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest --numprocesses 3 --dist loadgroup $(UNIT) $(ARGS)

$(LOWEST)/.installed: pyproject.toml | install
	@echo "Making $(LOWEST) and installing the lowest versions (several GB with PyTorch) ..."
	$(PYTHON) -m venv --clear $(LOWEST)
	$(BIN)/python .ci/lowest.py > $(LOWEST)/pins.txt
	$(LOWEST)/bin/python -m pip install --quiet --requirement $(LOWEST)/pins.txt
	$(LOWEST)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

test-processors: install          ## all tests as on a processor without AVX-512, then with torch's plainest kernels
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(MAKE) test test-system
	ATEN_CPU_CAPABILITY=default $(MAKE) test test-system

lint: install                     ## ruff: style and format; codespell: American spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files | xargs $(BIN)/codespell

types: install                    ## mypy --strict
	$(BIN)/mypy

check: lint types test test-system ## everything that CI runs

bench: install                   ## every claim of speed beside loops written by hand, in turn; on two cores 40 minutes
	$(BIN)/python benchmarks/step.py --which one $(ARGS)
	$(BIN)/python benchmarks/step.py --which two $(ARGS)
	$(BIN)/python benchmarks/step.py --which own $(ARGS)
	$(BIN)/python benchmarks/step.py --which compiled $(ARGS)
	$(BIN)/python benchmarks/step.py --which compiled-two $(ARGS)
	$(BIN)/python benchmarks/resnet_step.py $(ARGS)
	$(BIN)/python benchmarks/threads.py $(ARGS)
	$(BIN)/python benchmarks/sampling.py $(ARGS)
	$(BIN)/python benchmarks/checkpoint_stall.py $(ARGS)
	$(BIN)/python benchmarks/start.py $(ARGS)
	$(BIN)/python benchmarks/input.py $(ARGS)
	$(BIN)/python benchmarks/features.py --feature tracking $(ARGS)
	$(BIN)/python benchmarks/features.py --feature tracking --model resnet $(ARGS)
	$(BIN)/python benchmarks/table.py
	$(BIN)/python benchmarks/control_plane.py

soak: install                    ## campaigns: stops, kills and faults at every place, on a real Slurm too (as root)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak --timeout 1800 $(ARGS)

test-image: install               ## builds the images of containers/ with buildah, and trains in them; 15 minutes (as root)
	$(BIN)/python -m pytest -m soak --timeout 3000 tests/system/test_image.py $(ARGS)

containers/requirements.txt: install ## pins the installed version of each package that Rankzero needs
	$(BIN)/python .ci/pinned.py > $@

system-tools:                     ## the Debian packages that system tests use (as root)
	apt-get update
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends slurm-wlm munge openmpi-bin mpich iproute2 strace shellcheck openssh-server chromium fonts-dejavu-core dataset-fashion-mnist

image-tools:                      ## the Debian packages that `make test-image` uses (as root)
	apt-get update
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends buildah debootstrap

clean:
	rm -rf $(VENV) $(LOWEST) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
