#!/usr/bin/env bash
# Write the lock files beside this script: every version with the SHA-256 of its files (`make lock`, then `make test`).
#
#   cpu.txt, cuda.txt   the environment of `make env`, for Linux and Python 3.11 to 3.13
#   image.txt           what redraft needs besides the packages in vLLM's image (recipes/deploy/Dockerfile)
#   log.txt             what the log's liveness probe needs
#   uv.txt              the installer itself
#   audit.txt           pip-audit, for `make check-deps`
#   docs.txt            the generator of the site, for `make docs`
#
# Not in them: torch of the CPU build. It comes from PyTorch's own index, or here and there from a local folder of wheels,
# so there is no one hash: torch-cpu.txt pins its version alone. For CUDA, torch comes from PyPI and is hashed as the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
extras=(--extra deepspeed --extra report --extra wandb --extra nats --extra gguf --extra dev)

unset UV_FIND_LINKS PIP_FIND_LINKS UV_TORCH_BACKEND  # a lock of PyPI's files

compile() {  # the file to write, then uv's arguments
    "$uv" pip compile --quiet --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
        --custom-compile-command 'make lock' --output-file "requirements/$1" ${UPGRADE:+--upgrade} "${@:2}"
}

# vLLM's CPU build asks for packages whose CUDA builds break its import: overrides.txt keeps them out.
UV_CONFIG_FILE=requirements/lock-cpu.toml compile cpu.txt pyproject.toml --universal --python-version 3.11 \
    --extra cpu "${extras[@]}" --overrides requirements/overrides.txt \
    $(sed 's/[ =].*//; s/^/--no-emit-package /' requirements/overrides.txt)
compile cuda.txt pyproject.toml --universal --python-version 3.11 --extra cuda "${extras[@]}"

image=(--python-version 3.12 --python-platform x86_64-manylinux_2_28)
in_image=$(sed -n 's/^\(vllm==[0-9.]*\).*/\1/p' requirements/cuda.txt \
    | "$uv" pip compile --quiet "${image[@]}" --no-annotate --no-header - \
    | sed 's/[=[].*//; s/^/--no-emit-package /')
compile image.txt pyproject.toml --extra nats "${image[@]}" --constraint requirements/cuda.txt $in_image
printf '%s\n' 'nats-py[nkeys]' tyro 'setuptools>=77' | compile log.txt "${image[@]}" --constraint requirements/cuda.txt -
echo uv | compile uv.txt --universal --python-version 3.11 -
printf '%s\n' zensical mkdocstrings-python | compile docs.txt --universal --python-version 3.11 -
echo pip-audit | compile audit.txt --universal --python-version 3.11 -
