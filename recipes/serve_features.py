"""Serve a target's hidden states to heads in training: vLLM with `extract_hidden_states` switched on.

    $ redraft serve-features meta-llama/Llama-3.1-70B-Instruct --layers 2 40 77 -- --tensor-parallel-size 8 --port 8001
    $ python recipes/eagle3_llama8b.py --signal.kind endpoint --signal.url http://127.0.0.1:8001

The last hidden state is always sent beside the layers. The states travel through `storage`, which the trainer must see
under the same name: memory (/dev/shm) on one machine, a shared disk or object storage (s3://bucket/states) between
several. What was read is removed. Several servers make a fleet: the trainer's --signal.url takes them all.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro
from transformers import AutoConfig

from distill.features import server_args
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Annotated[str, tyro.conf.Positional]
    """The target: a folder or a hub name."""
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Behind `--`: further arguments of vLLM's server."""
    layers: tuple[int, ...] = ()
    """Layers that the head reads; k is the residual stream after k layers, 0 the embeddings."""
    storage: str = "/dev/shm/redraft-features"
    """Folder or fsspec URL that the states of one request pass through; it holds as many requests as are under way."""


def main(cfg: Config) -> None:
    """Raises: ValueError for a layer that the target does not have."""
    num_layers = AutoConfig.from_pretrained(cfg.target).get_text_config().num_hidden_layers
    # Not the `vllm` command: it fails where the distribution has another name, as the CPU build has.
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", cfg.target]
    command = [*server, *server_args(cfg.layers, num_layers, cfg.storage), *cfg.vllm_args]
    os.execv(command[0], command)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
