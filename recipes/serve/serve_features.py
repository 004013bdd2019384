"""Start a vLLM server that sends the target's hidden states, to train heads.

It uses vLLM's `extract_hidden_states` method.

    $ redraft serve-features meta-llama/Llama-3.1-70B-Instruct --layers 2 40 77 -- \\
          --tensor-parallel-size 8 --port 8001
    $ redraft train eagle3 --target meta-llama/Llama-3.1-70B-Instruct --prove.no-engine \\
          --signal.kind endpoint --signal.url http://127.0.0.1:8001

The last hidden state is always sent as well. The states pass through `storage`: memory (/dev/shm)
on one machine, a shared disk or object storage (s3://bucket/states) between machines. Set the
trainer's --signal.storage to the same value. The trainer reads nothing else, and deletes states
after reading them. For more throughput, start several servers: --signal.url accepts a list.
"""

import os
from dataclasses import dataclass
from typing import Annotated

import tyro

from redraft.distill.signal.storage import DEFAULT_STORAGE, StatesFormat


@dataclass(frozen=True, kw_only=True)
class FeaturesConfig:
    target: Annotated[str, tyro.conf.Positional]
    """Folder or hub name of the target."""
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Arguments for vLLM's server, after `--`."""
    layers: tuple[int, ...] = ()
    """Target layers that the head reads: k is the residual stream after k layers, 0 the embeddings.
    """
    storage: str = DEFAULT_STORAGE
    """Folder or fsspec URL through which the states pass, with room for all requests in flight. Set
    the trainer's --signal.storage to the same value: the trainer reads nothing outside this folder.
    """
    format: StatesFormat = "exact"
    """Format of the states. `exact`: the values that the server computes. `float8`: 8-bit floats
    with one scale per state, which take half the bytes of bfloat16. The trainer reads both.
    """


UNSENT = ("deepseek_v4",)  # Types of targets whose states vLLM 0.32 cannot send.


def main(cfg: FeaturesConfig) -> None:
    """Replace this process with the server.

    Raises:
        ValueError: the target has no such layer, or vLLM cannot send the target's states.
    """
    # Imported here, because they import torch.
    from redraft.engine.server import allow_slow_start
    from redraft.engine.settings import read_settings, write_settings
    from redraft.engine.wait import ENABLED
    from redraft.files.checkpoint import load_text_config
    from redraft.recipes.serve.serve import with_plugin

    config = load_text_config(cfg.target)
    if config.model_type in UNSENT:
        raise ValueError(
            f"vLLM keeps the KV cache of {cfg.target} (type {config.model_type}) in several "
            f"groups, but it can send hidden states only from a single group: train with the "
            f"target in the "
            "training process (--signal.kind model)"
        )
    command = server_command(cfg, config.num_hidden_layers)
    # The plugin detects when weights are replaced.
    variables = {
        **allow_slow_start(os.environ),
        "VLLM_PLUGINS": with_plugin(os.environ.get("VLLM_PLUGINS")),
        **write_settings(read_settings(), ENABLED),
    }
    os.execve(command[0], command, os.environ | variables)


def server_command(cfg: FeaturesConfig, num_layers: int) -> list[str]:
    """Return the command line of vLLM's server for a target with `num_layers` layers.

    Raises:
        ValueError: a layer does not exist, or redraft does not support this version of vLLM.
    """
    from redraft.distill.signal.features import server_args
    from redraft.engine.command import vllm_command
    from redraft.engine.server import engine_dtype, require_runner

    require_runner(None)
    states = server_args(cfg.layers, num_layers, cfg.storage, cfg.format)
    # Our arguments come before the user's, which take precedence.
    return vllm_command(cfg.target, ["--dtype", engine_dtype(cfg.target), *states, *cfg.vllm_args])
