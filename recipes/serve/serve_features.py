"""Serve a target's hidden states for the training of heads: vLLM with `extract_hidden_states` switched on."""

from __future__ import annotations

import os

from redraft.distill.signal.features import server_args
from redraft.eval.engine.command import vllm_command
from redraft.eval.engine.server import engine_dtype
from redraft.eval.engine.wait import ENABLED
from redraft.heads.files.checkpoint import load_text_config
from redraft.recipes.serve.serve_features_config import Config

UNSENT = ("deepseek_v4",)
"""Types of targets whose states vLLM 0.32 does not send."""


def main(cfg: Config) -> None:
    """Replace this process by the server.

    Raises:
        ValueError: for a layer the target does not have, or a target whose states vLLM does not send.
    """
    config = load_text_config(cfg.target)
    if config.model_type in UNSENT:
        raise ValueError(
            f"{cfg.target} is of type {config.model_type}, whose keys vLLM keeps in several groups, and hidden states "
            "are sent beside one group only: train with the target in the training process (--signal.kind model)"
        )
    command = server_command(cfg, config.num_hidden_layers)
    os.execve(command[0], command, os.environ | {ENABLED: "1"})


def server_command(cfg: Config, num_layers: int) -> list[str]:
    """The command line of vLLM's server for a target of `num_layers`. Raises ValueError for a layer beyond them."""
    states = server_args(cfg.layers, num_layers, cfg.storage, cfg.format)
    # Before the user's arguments, which win.
    return vllm_command(cfg.target, ["--dtype", engine_dtype(cfg.target), *states, *cfg.vllm_args])
