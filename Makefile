# Each target sets up what it needs and can be run again. Settings: PYTHON=…, ARGS="…" (passed on), PIE_CACHE, PIE_* (pie serve --help).

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help serve test lint bench wasm web model clean system-packages

VENV := .venv
BIN := $(VENV)/bin
PAGE := $(BIN)/python -m pie_server.build.web --install-node
PYTHON ?=
ARGS ?=

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

serve: $(VENV)/.stamp-serve ## Set up, fetch the default model, serve on http://127.0.0.1:8080
	@$(BIN)/python -m pie_server.prepare
	@$(PAGE) --optional >/dev/null
	@$(BIN)/pie model pull >/dev/null
	@exec $(BIN)/pie serve $(ARGS)

test: $(VENV)/.stamp-dev system-packages ## Set up and run the tests (ARGS="-k name" for some of them)
	@$(BIN)/python -m pie_server.prepare
	@$(PAGE) >/dev/null
	@$(BIN)/pie model pull >/dev/null
	@exec $(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.stamp-dev ## Check style and types
	@$(BIN)/ruff check .
	@mkdir -p build/mypy && ln -sfn ../../server build/mypy/pie_server
	@MYPYPATH=build/mypy:web/python $(BIN)/mypy -p pie_core -p kernels_wgsl -p pie_server -p pie_web
	@$(PAGE) --check

# Each prints its table; --device webgpu is the software rasteriser where there is no GPU.
BENCHES := "accuracy --device cpu" "accuracy --device webgpu" engine kernels_cpu kernels_webgpu "decode --device cpu" "decode --device webgpu --tokens 24" \
  "tax --device cpu" "tax --device webgpu" "memory --device cpu" "memory --device webgpu" "browser --device cpu" \
  "epilogue --device cpu" "epilogue --device webgpu" batch prefix fork runahead soak

bench: $(VENV)/.stamp-dev ## Run the benchmarks, one file a question
	@$(BIN)/python -m pie_server.prepare
	@$(BIN)/pie model pull >/dev/null
	@missed=; for bench in $(BENCHES); do \
	  echo "== python -m bench.$$bench"; $(BIN)/python -m bench.$$bench $(ARGS) || missed="$$missed [$$bench]"; \
	done; \
	if [ -n "$$missed" ]; then echo "make: figures missed their targets in:$$missed" >&2; exit 1; fi

wasm: $(VENV)/.stamp-serve ## Build the cpu device's module and the Python language component
	@$(BIN)/python -m pie_server.prepare

web: $(VENV)/.stamp-serve ## Build the page and print its folder; compressed as hard as possible, which takes minutes once
	@$(PAGE) --best

model: $(VENV)/.stamp-serve ## Fetch the default model
	@$(BIN)/pie model pull

clean: ## Remove the environment and build outputs (models and caches under $PIE_CACHE stay)
	rm -rf $(VENV) build web/node_modules web/dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# A candidate counts only if it really runs: version managers leave shims of versions that are not installed.
$(BIN)/python:
	@found=; \
	for candidate in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "make: Python 3.11 or newer is needed and $(or $(PYTHON),python3) is not; install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import venv, ensurepip' >/dev/null 2>&1; then \
	  echo "make: $$found lacks the modules venv and ensurepip; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	fi; \
	echo "creating $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv $(VENV) || { rm -rf $(VENV); echo "make: $$found could not create $(VENV)" >&2; exit 1; }

define install
	@echo "installing $(EXTRAS)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e ".[$(EXTRAS)]" || \
	  { echo "make: pip could not install .[$(EXTRAS)]; check the network and pip's index settings (pip config list)" >&2; exit 1; }
	@touch $@
endef

$(VENV)/.stamp-serve: EXTRAS := server,gpu
$(VENV)/.stamp-serve: pyproject.toml | $(BIN)/python
	$(install)

$(VENV)/.stamp-dev: EXTRAS := server,gpu,dev
$(VENV)/.stamp-dev: pyproject.toml | $(BIN)/python
	$(install)
	@touch $(VENV)/.stamp-serve

# Tests only: a software Vulkan driver for the webgpu device, and chromium, whose SwiftShader runs the second shader compiler.
define missing_packages
missing=; \
ls /usr/share/vulkan/icd.d/lvp_icd*.json >/dev/null 2>&1 || missing="$$missing mesa-vulkan-drivers"; \
ls /usr/lib/*/libvulkan.so.1 /usr/lib/libvulkan.so.1 /usr/lib64/libvulkan.so.1 2>/dev/null | grep -q . || missing="$$missing libvulkan1"; \
ls /usr/lib/chromium/vk_swiftshader_icd.json >/dev/null 2>&1 || missing="$$missing chromium"
endef

system-packages:
	@$(missing_packages); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if ! command -v apt-get >/dev/null 2>&1; then \
	  echo "make: the tests need software Vulkan (lavapipe), the Vulkan loader and chromium; missing, by their Debian names:$$missing" >&2; exit 1; \
	fi; \
	if [ "$$(id -u)" -ne 0 ]; then \
	  echo "make: the tests need Debian packages that are missing; install them: sudo apt-get install$$missing" >&2; exit 1; \
	fi; \
	echo "installing Debian packages:$$missing"; \
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; } || \
	  { echo "make: apt-get could not install$$missing; install them by hand and run make again" >&2; exit 1; }; \
	$(missing_packages); \
	if [ -n "$$missing" ]; then echo "make: these packages are installed but their files are not where Debian puts them:$$missing" >&2; exit 1; fi
