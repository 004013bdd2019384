"""Serve a target's hidden states for the training of heads: vLLM with `extract_hidden_states` switched on.

    $ redraft serve-features meta-llama/Llama-3.1-70B-Instruct --layers 2 40 77 -- --tensor-parallel-size 8 --port 8001
    $ redraft train eagle3 --target meta-llama/Llama-3.1-70B-Instruct --prove.no-engine \\
          --signal.kind endpoint --signal.url http://127.0.0.1:8001

The last hidden state is always sent as well. The states pass through `storage`: memory (/dev/shm) on one machine, a
shared disk or object storage (s3://bucket/states) between machines. Give the trainer the same as --signal.storage. It
reads nothing else, and removes states after reading them. For more throughput, start several servers: --signal.url
takes a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from redraft.distill.signal.storage import DEFAULT_STORAGE, StatesFormat


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Annotated[str, tyro.conf.Positional]
    """Folder or hub name of the target."""
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Further arguments of vLLM's server, after `--`."""
    layers: tuple[int, ...] = ()
    """Layers read by the head: k means the residual stream after k layers, 0 the embeddings."""
    storage: str = DEFAULT_STORAGE
    """Folder or fsspec URL through which the states pass, with room for all requests in flight. The trainer's
    --signal.storage must be the same: it reads nothing outside of it."""
    format: StatesFormat = "exact"
    """Format of the states. `exact`: as the server computes them. `float8`: 8-bit floats with a scale for each state,
    half the bytes of bfloat16. The trainer reads both."""
