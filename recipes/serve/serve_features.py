"""Serve a target's hidden states for the training of heads.

VLLM with `extract_hidden_states` switched on.

    $ redraft serve-features meta-llama/Llama-3.1-70B-Instruct --layers 2 40 77 -- \
    --tensor-parallel-size 8 --port 8001
    $ redraft train eagle3 --target meta-llama/Llama-3.1-70B-Instruct --prove.no-engine \\
          --signal.kind endpoint --signal.url http://127.0.0.1:8001

The last hidden state is always sent as well. The states pass through `storage`: memory (/dev/shm)
on one machine, a shared disk or object storage (s3://bucket/states) between machines. Give the
trainer the same as --signal.storage. It reads nothing else, and removes states after reading them.
For more throughput, start several servers: --signal.url takes a list.
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
    """Further arguments of vLLM's server, after `--`."""
    layers: tuple[int, ...] = ()
    """Layers read by the head: k means the residual stream after k layers, 0 the embeddings."""
    storage: str = DEFAULT_STORAGE
    """Folder or fsspec URL through which the states pass, with room for all requests in flight. The
    trainer's

    --signal.storage must be the same: it reads nothing outside of it.
    """
    format: StatesFormat = "exact"
    """Format of the states. `exact`: as the server computes them. `float8`: 8-bit floats with a
    scale for each state, half the bytes of bfloat16. The trainer reads both.
    """


UNSENT = ("deepseek_v4",)  # Types of targets whose states vLLM 0.32 does not send.


def main(cfg: FeaturesConfig) -> None:
    """Replace this process with the server.

    Raises:
        ValueError: the target has no such layer, or vLLM does not send the target's states.
    """
    # Here, because they import torch.
    from redraft.engine.settings import read_settings, write_settings
    from redraft.engine.wait import ENABLED
    from redraft.files.checkpoint import load_text_config
    from redraft.recipes.serve.serve import with_plugin

    config = load_text_config(cfg.target)
    if config.model_type in UNSENT:
        raise ValueError(
            f"{cfg.target} has the type {config.model_type}, whose keys vLLM keeps in several "
            "groups, and hidden states "
            "are sent beside one group only: train with the target in the training process "
            "(--signal.kind model)"
        )
    command = server_command(cfg, config.num_hidden_layers)
    # The plugin notices weights that move.
    variables = {
        "VLLM_PLUGINS": with_plugin(os.environ.get("VLLM_PLUGINS")),
        **write_settings(read_settings(), ENABLED),
    }
    os.execve(command[0], command, os.environ | variables)


def server_command(cfg: FeaturesConfig, num_layers: int) -> list[str]:
    """The command line of vLLM's server for a target with `num_layers` layers.

    Raises:
        ValueError: a layer is beyond them, or redraft does not support this vLLM.
    """
    from redraft.distill.signal.features import server_args
    from redraft.engine.command import vllm_command
    from redraft.engine.server import engine_dtype, require_runner

    require_runner(None)
    states = server_args(cfg.layers, num_layers, cfg.storage, cfg.format)
    # Before the user's arguments, which win.
    return vllm_command(cfg.target, ["--dtype", engine_dtype(cfg.target), *states, *cfg.vllm_args])
