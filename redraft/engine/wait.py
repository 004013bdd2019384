"""The plugin for engines that redraft starts itself, and the conditions of its features."""

import sys

from redraft.engine import hooks
from redraft.engine.machine import VLLM_VERSION
from redraft.engine.settings import read_settings

ENABLED = {"engine_wait": True}
"""Settings for servers that measure or send hidden states. Other servers have the whole plugin."""


def register() -> None:
    """Entry point for vLLM's general plugins. Does nothing without the settings ENABLED."""
    if read_settings().get("engine_wait") and not hooks.find_unsupported(VLLM_VERSION):
        for feature in hooks.FEATURES:
            if feature.is_measured:
                hooks.install_if_asked(feature)


def is_cpu() -> bool:
    """Whether this is vLLM's CPU build."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


LAUNCHER = "vllm.entrypoints.launchers.launcher"


def has_launcher() -> bool:
    """Whether vLLM's API server runs in this process."""
    return LAUNCHER in sys.modules
